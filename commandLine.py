"""What the scripts' command lines share: one line for whatever is wrong, and exit codes."""

import argparse
import sys

from utils import UserError


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag gets one line."""

    def error(self, message):
        raise UserError(message)


def as_command(script, work, kept):
    """Run `work()` and return the exit code: 0; 2 after one line for what stopped it; 130 after Ctrl-C, when `kept`
    says what is not lost."""
    try:
        work()
    except UserError as error:
        print(f"{script}: error:", *str(error).split(), file=sys.stderr)  # one line, whatever a file's name holds
        return 2
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept}", file=sys.stderr)
        return 130
    return 0
