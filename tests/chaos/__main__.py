"""`python -m tests.chaos`: run the campaign, or add up the reports of its parts."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

# Before PyTorch is imported: one thread, so that forked children can compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Parse the arguments and run the cases."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    parser.add_argument("--resume", action="store_true", help="add to what --json contains")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose names contain this")
    parser.add_argument("--skip", metavar="TEXT", help="no cases whose names contain this")
    parser.add_argument(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing: print the sum of such JSON files as a Markdown table",
    )
    args = parser.parse_args()
    from tests.chaos.campaign import HEADER, markdown, merge, run

    if args.table:
        print(markdown(merge(args.table)))
        return 0
    import torch

    from tests.chaos.cases import CASES

    logging.disable()  # warnings are expected by the thousand
    torch.set_num_threads(1)
    os.environ["MIV_CACHE"] = "off"
    print(HEADER)
    chosen = [case for case in CASES if args.only is None or args.only in case.name]
    chosen = [case for case in chosen if args.skip is None or args.skip not in case.name]
    tallies = run(chosen, args.minutes, args.seed, args.json, resume=args.resume)
    failed = sum(tally.failed for tally in tallies)
    print(f"\n{sum(tally.tried for tally in tallies):,} faults tried, {failed:,} failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
