"""Record the accuracy of several quantization settings side by side, all on the same pictures in one pass.

python scripts/record_accuracy.py --model tiny200_deit_tiny --checkpoint weights.safetensors --data val/ \
    --calib calib.parquet --settings standard high paper --device cuda --output docs/results/deit_tiny.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from qvit import QvitError
from qvit.evaluation.runner import SETTINGS, EvaluationOptions, format_report, run_evaluation, write_report

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="short name of a YAML in configs/, or the path of one")
    parser.add_argument("--checkpoint", help="file of weights, by default the YAML's or timm's")
    parser.add_argument("--data", help="source of the pictures, by default the YAML's")
    parser.add_argument("--calib", help="source of the calibration pictures")
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=["standard", "high", "paper"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-drop", type=float, default=0.1, help="of the paired test, in percentage points")
    parser.add_argument("--output", required=True, help="JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status: 0 whatever the tests say, for a failed test is a result too."""
    args = parse_arguments(arguments)
    try:
        options = EvaluationOptions(
            model=args.model,
            settings={name: SETTINGS[name] for name in args.settings},
            data=args.data,
            checkpoint=args.checkpoint,
            device=args.device,
            batch_size=args.batch_size,
            workers=args.workers,
            limit=args.limit,
            calib=args.calib,
            max_drop=args.max_drop,
        )
        report = run_evaluation(options, CONFIGS)
        write_report(report, args.output)
    except QvitError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(format_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
