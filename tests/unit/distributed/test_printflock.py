"""Eight processes print 100 lines each. No two lines mix."""

import subprocess
import sys
from collections import Counter

PROGRAM = """
import sys
from torchtitan_like.distributed.printflock import printflock as print
for i in range(100):
    print(sys.argv[1], *(sys.argv[1] * 200 for _ in range(10)), i, sep="|")
"""


def test_concurrent_lines_do_not_mix(tmp_path, repo_root):
    path = tmp_path / "output"
    with open(path, "a") as output:
        ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank)], stdout=output, cwd=repo_root)
                 for rank in range(8)]  # fmt: skip
        assert [rank.wait(60) for rank in ranks] == [0] * 8
    lines = path.read_text().splitlines()
    assert all(
        line == "|".join([line[0], *[line[0] * 200] * 10, line.rsplit("|", 1)[1]]) for line in lines
    )
    assert Counter(line[0] for line in lines) == {str(rank): 100 for rank in range(8)}
