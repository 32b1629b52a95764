"""Measure what the integer attention costs: Top-1, Top-5, agreement and logit SQNR of one model.

python scripts/eval_imagenet.py --model demo_deit --data demo
python scripts/eval_imagenet.py --model deit_small --data /data/imagenet --device cuda --max-drop 0.5

Exit status: 0, 1 when --max-drop or --min-sqnr failed, 2 when the evaluation could not run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from qvit import QvitError
from qvit.evaluation.runner import EvaluationOptions, format_report, run_evaluation, write_report

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="short name of a YAML in configs/, or the path of one")
    parser.add_argument("--data", help="demo, a folder or file of parquet or arrow, an ImageFolder, or a Hub name")
    parser.add_argument("--checkpoint", help=".safetensors, .pth or .pt file instead of timm's weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, help="processes that decode pictures")
    parser.add_argument("--limit", type=int, help="evaluate so many pictures, evenly spread over the set")
    parser.add_argument("--streaming", action="store_true", help="stream a Hub data set instead of downloading it")
    parser.add_argument("--calib", help="source of calibration pictures; default: the training split beside --data")
    parser.add_argument("--calib-batches", type=int, help="batches of 32 pictures for calibration")
    parser.add_argument("--transform", help='changes to the YAML\'s data section: "antialias: false, crop_pct: 1.0"')
    parser.add_argument("--precision", choices=("standard", "high"))
    parser.add_argument("--arithmetic", choices=("qvit", "paper", "paper_text"))
    parser.add_argument(
        "--max-drop", type=float, help="fail when Top-1 drops by more points, or below the YAML's min_sqnr"
    )
    parser.add_argument("--min-sqnr", type=float, help="fail when the SQNR of the logits is below so many dB")
    parser.add_argument("--output", help="write the results to this JSON file")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> dict:
    """Evaluate, print the table and write the JSON file."""
    changes = {"precision": args.precision, "arithmetic": args.arithmetic}
    options = EvaluationOptions(
        model=args.model,
        settings={"quantized": {key: value for key, value in changes.items() if value is not None}},
        data=args.data,
        checkpoint=args.checkpoint,
        device=args.device,
        batch_size=args.batch_size,
        workers=args.workers,
        limit=args.limit,
        streaming=args.streaming,
        calib=args.calib,
        calib_batches=args.calib_batches,
        transform=args.transform,
        max_drop=args.max_drop,
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
