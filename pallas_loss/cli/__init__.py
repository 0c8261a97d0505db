"""The command line: what runs on this machine and why, and how fast it is here."""

import argparse
import sys
from collections.abc import Sequence

from pallas_loss._errors import UnsupportedError
from pallas_loss.cli import bench, info
from pallas_loss.cli.shapes import Shape

_SHAPE = "tokens, hidden, vocabulary: 8192,4096,128256"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for arguments that cannot be served."""
    args = _parser().parse_args(argv)
    try:
        for line in args.run(args):
            print(line, flush=True)
    except (ValueError, UnsupportedError, ImportError) as error:
        print(f"pallas_loss {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_loss", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("info", help="what runs here and why", description=info.__doc__)
    command.add_argument("shape", nargs="?", type=Shape.parse, metavar="T,H,V", help=_SHAPE)
    _common(command)
    command.add_argument(
        "--no-compile", action="store_true", help="leave out the memory of the compiled program"
    )
    command.set_defaults(run=info.report)

    command = commands.add_parser("bench", help="a table of times", description=bench.__doc__)
    command.add_argument("shape", type=Shape.parse, metavar="T,H,V", help=_SHAPE)
    _common(command)
    command.add_argument("--rounds", type=_positive, default=5, help="samples of each program")
    command.set_defaults(run=bench.report)
    return parser


def _common(command: argparse.ArgumentParser) -> None:
    dtypes = ("bfloat16", "float16", "float32")
    command.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of x and w")
    command.add_argument("--layout", default="hv", choices=("hv", "vh"), help="of w")
    command.add_argument("--implementation", help="a name, in place of the library's choice")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)
