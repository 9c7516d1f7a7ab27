"""The event file and the journal of one run.

* `writer.EventFileWriter`: the supervisor's own event file; `adapter.FileWriterAdapter`: one that the user passed.
  Both are a `base.SummaryWriter` over a `sink.Sink`, which never stalls a step.
* `journal.Journal`: ``journal.jsonl``, one line per event.
"""
