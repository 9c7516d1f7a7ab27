"""One `run` on its way to a thread and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asupervisor.runtime.calls import Call, Mailbox, Rendezvous

if TYPE_CHECKING:
    from asupervisor.session.plan import RunPlan
    from asupervisor.session.session import AsyncSession


class RunCall(Call):
    """One `run` on its way."""

    __slots__ = ("aside", "feed_dict", "fetches", "options", "plan", "run_metadata", "session")

    def __init__(
        self,
        session: AsyncSession,
        mailbox: Mailbox | Rendezvous,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        plan: RunPlan | None,
    ) -> None:
        super().__init__(mailbox, session._emit)
        self.session = session
        self.fetches = fetches
        self.feed_dict = feed_dict
        self.options = options
        self.run_metadata = run_metadata
        self.plan = plan
        self.aside = False

    def invoke(self) -> Any:
        """See `Call.invoke`."""
        return self.session._perform(self)

    def describe(self) -> str:
        """See `Call.describe`."""
        return f"run of {describe_fetches(self.fetches)}"

    def withdraw(self) -> bool:
        """Take it out of whichever lane it is in; `_hold` and `resume` may be moving it at this moment."""
        while True:
            lane = self.lane
            if super().withdraw():
                return True
            if lane is self.lane:
                return False


def describe_fetches(fetches: Any) -> str:
    """Names of the fetches, shortened."""
    text = repr(_names(fetches))
    return text if len(text) <= 120 else text[:117] + "..."


def _names(fetches: Any) -> Any:
    if isinstance(fetches, dict):
        return {key: _names(value) for key, value in fetches.items()}
    if isinstance(fetches, list | tuple):
        return [_names(value) for value in fetches]
    name = getattr(fetches, "name", None)
    return name if isinstance(name, str) else fetches
