"""Python's garbage collector, kept from searching what the frameworks leave for good."""

import gc


def suspend_collector() -> None:
    """Before the imports: they make a million objects that stay, each search among which is lost.

    Without this, importing NeMo takes over a second longer.
    """
    gc.disable()


def resume_collector() -> None:
    """After the imports: collects again, but never looks at what is there by now."""
    gc.freeze()
    gc.enable()
