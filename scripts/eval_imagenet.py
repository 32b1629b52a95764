"""Measure what the integer attention costs: Top-1, Top-5, agreement and logit SQNR of one model.

python scripts/eval_imagenet.py --model demo_deit --data demo
python scripts/eval_imagenet.py --model deit_small --data /data/imagenet --device cuda --max-drop 0.5

Exit status: 0, 1 when --max-drop or --min-sqnr failed, 2 when the evaluation could not run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qvit import QvitError
from qvit.evaluation.runner import (
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
    parser.add_argument("--streaming", action="store_true", help="stream a Hub data set instead of downloading it")
    parser.add_argument("--calib-batches", type=int, help="batches of 32 pictures for calibration")
    parser.add_argument("--transform", help='changes to the YAML\'s data section: "antialias: false, crop_pct: 1.0"')
    parser.add_argument("--precision", choices=("standard", "high"))
    parser.add_argument("--arithmetic", choices=("qvit", "paper", "paper_text"))
    parser.add_argument("--min-sqnr", type=float, help="fail when the SQNR of the logits is below so many dB")
    parser.add_argument("--output", help="write the results to this JSON file")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> dict:
    """Evaluate, print the table and write the JSON file."""
    if args.output:
        check_output(args.output)
    changes = {"precision": args.precision, "arithmetic": args.arithmetic}
    options = EvaluationOptions(
        **shared_options(args),
        settings={"quantized": {key: value for key, value in changes.items() if value is not None}},
        streaming=args.streaming,
        calib_batches=args.calib_batches,
        transform=args.transform,
        min_sqnr=args.min_sqnr,
    )
    report = run_evaluation(options, CONFIGS)
    print(format_report(report))
    if args.output:
        write_report(report, args.output)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    try:
        report = run(parse_arguments(arguments))
    except QvitError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
