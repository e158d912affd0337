"""The page about the paper: it lists every item, its commands exist, its configurations load."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from importlib import import_module
from pathlib import Path

from mivhead.benchmark.config import describe_table, list_tables, load_config
from mivhead.cli.main import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "the-paper.md"
TEXT = PAGE.read_text(encoding="utf-8")
# Every label of a table, a figure or an equation in the paper's source.
LABELS = """
tab:miv_acc tab:summ1shot tab:latency tab:miv_diversebb tab:lntune_acc tab:lntune_cost tab:abl
tab:intx tab:intx_blkpool tab:intx_blkpool_summ tab:intx2 tab:intx_blkpoolcap
tab:intx_blkpoolcap_summ tab:opt_setting tab:miv_ci tab:1shot tab:miv_fh tab:moreacc
tab:miv_morebb tab:blpp_morebb tab:morebb tab:abl_blk tab:more_abl tab:da_abl tab:rn18
fig:task_fscmiv fig:tsne_miv_a1 fig:tsne_tsa_a1 fig:tsne_full fig:arch_a fig:arch_b fig:arch
fig:arch_c fig:ett_cost_ssp fig:abl_blk fig:tsa_cost_ssp fig:time_spv fig:tsne_miv_a2
fig:tsne_tsa_a2 fig:tsne_miv_o1 fig:tsne_tsa_o1 fig:tsne_miv_o2 fig:tsne_tsa_o2 fig:tsne_more
ppool1 ppool2 perhead perhead_p perhead_q dba sce full_skip no_skip simple_skip
"""
COMMANDS = [" ".join(c.split()) for c in re.findall(r"`(miv [^`]+)`", TEXT)]
GROUPS = {"bench": {"list", "run", "report", "compare"}, "data": {"list", "prepare"}}


def test_every_item_is_listed():
    assert not [label for label in LABELS.split() if f"`{label}`" not in TEXT]


def test_items_of_configurations_stand_next_to_their_commands():
    for name in list_tables():
        for label in re.findall(r"(?:tab|fig):\w+", describe_table(name).paper):
            rows = [row for row in TEXT.splitlines() if f"`{label}`" in row]
            whole = [
                n for n in list_tables() if re.search(rf"{label}(,|$)", describe_table(n).paper)
            ]
            assert rows, label
            assert any(f"miv bench run {each} " in row for row in rows for each in whole), label


def test_commands_exist():
    parser = build_parser()
    for command in dict.fromkeys(COMMANDS):
        words = shlex.split(command)[1:]
        if words in (["bench", "list"], ["data", "list"]) or len(words) > 2:
            parser.parse_args(words)
            if words[:2] == ["bench", "run"] and words[2] != "NAME":
                assert load_config(words[2]).methods, command
        else:
            assert words[0] in {"methods", "bench", "data", "backbones", "plot"}, command
            known = GROUPS.get(words[0], words)
            assert len(words) == 1 or words[1] in known, command


def test_modules_and_links_exist():
    for name in set(re.findall(r"`(mivhead\.[\w.]+)`", TEXT)):
        import_module(name)
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_every_item_names_tests_that_exist():
    section = TEXT.split("## How each item was seen")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*\| ([\w ]+) \|$", section, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 114))
    counts = Counter(seen for _, seen in rows)
    stated = {
        "yes": "{} are seen",
        "partly": "{} partly",
        "no": "{} is not",
        "not applicable": "{} are",
    }
    assert counts.keys() == stated.keys()
    assert all(text.format(counts[seen]) in section for seen, text in stated.items())
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", section))
    assert len(named) > 100
    for file, test in sorted(named):
        assert f"def {test}(" in (PAGE.parents[2] / file).read_text(encoding="utf-8"), (file, test)
