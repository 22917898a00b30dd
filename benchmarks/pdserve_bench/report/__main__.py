"""Shows reports again that were written with --json, or draws them: no benchmark runs.

    python -m pdserve_bench.report goodput.json                         the tables, in the terminal
    python -m pdserve_bench.report goodput.json --plot goodput          goodput.png
    python -m pdserve_bench.report systems.json goodput.json --plot docs/performance.png \\
        --charts goodput,latency --title "One engine against the graph"   several reports in one picture
    python -m pdserve_bench.report systems.json --list                  its charts, by number and title
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve_bench.options import program
from pdserve_bench.report import check_outputs
from pdserve_bench.report.saved import choose, read, together


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a wrong command line or file."""
    parser = program(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON that --json wrote")
    parser.add_argument("--plot", type=Path, metavar="NAME", help="write NAME.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report of all files there")
    parser.add_argument(
        "--charts", default="", metavar="LIST", help="only these: numbers, or parts of titles"
    )
    parser.add_argument("--list", action="store_true", help="the charts, and nothing else")
    parser.add_argument("--title", metavar="TEXT", help="instead of the reports' own")
    parser.add_argument("--lead", metavar="TEXT", help="instead of the reports' own verdict and lead")
    args = parser.parse_args(argv)
    try:
        check_outputs(args.json, args.plot)
        report = together([read(file) for file in args.files])
        if args.list:
            print("\n".join(f"{number:2}  {chart.title}" for number, chart in enumerate(report.charts, 1)))
            return 0
        report.charts = choose(report.charts, args.charts)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    report.title = args.title or report.title
    if args.lead is not None:
        report.verdict, report.lead = "", args.lead
    if args.plot is None and args.json is None:
        report.show()
    report.write(args.json, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
