"""Record the accuracy of several quantization settings side by side, all on the same pictures in one pass.

python scripts/record_accuracy.py --model tiny200_deit_tiny --checkpoint weights.safetensors --data val/ \
    --calib calib.parquet --settings standard high paper --device cuda --output docs/results/deit_tiny.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qvit import QvitError
from qvit.evaluation.runner import (
    SETTINGS,
    EvaluationOptions,
    argument_parser,
    check_output,
    format_report,
    run_evaluation,
    shared_options,
    write_report,
)

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=["standard", "high", "paper"])
    parser.add_argument("--output", required=True, help="JSON file")
    parser.set_defaults(batch_size=128, max_drop=0.1)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status: 0 whatever the tests say, for a failed test is a result too."""
    args = parse_arguments(arguments)
    try:
        check_output(args.output)
        settings = {name: SETTINGS[name] for name in args.settings}
        options = EvaluationOptions(**shared_options(args), settings=settings)
        report = run_evaluation(options, CONFIGS)
        write_report(report, args.output)
    except QvitError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(format_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
