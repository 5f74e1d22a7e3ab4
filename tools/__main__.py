"""Runs a command: megatools check | compare | trace."""

import sys

COMMANDS = ("check", "compare", "trace")


def main() -> int:
    """Runs the command that the first argument names, and returns its exit status."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        print(f"usage: megatools {' | '.join(COMMANDS)} ...", file=sys.stderr)
        return 2
    from importlib import import_module

    return int(import_module(f".{name}", __package__).main())


if __name__ == "__main__":
    sys.exit(main())
