"""Numbers that no published file holds, by page and by where they come from.

Each phrase stands in its page word for word. What a measurement gave never belongs here: publish the file that has it,
and compute the sentence from that file.
"""

from __future__ import annotations

PAPER = "a paper says so"
SETUP = "how a run was set up: it is in the command beside it"
MEANING = "a definition, a default, a requirement or a limit of the code"
ARITHMETIC = "follows from numbers that stand beside it"
TESTED = "a test, which the page names, fails beyond it"
MAKER = "the maker of the hardware or the library says so"

GIVEN: dict[str, dict[str, list[str]]] = {
    "README.md": {
        MEANING: [
            "Python 3.11 or newer and about 4 GB of disk",
            "CUDA 13 (580 or newer); for an older driver (525 or newer)",
        ],
    },
    "docs/history.md": {
        PAPER: [
            "The paper gains 13 to 15 % on a GPU",
            "In the paper their perplexities differ by at most 0.02",
            "27 % of the sessions have one turn, the mean is 5.75, 47 % hold more than 2K tokens and 30 % more than 4K",
            "(16.4 % and 9.0 %, the paper's)",
            "LLaMA-65B takes 0.36 s for 2K tokens (section 2.4); figure 19 saves 35 % without a buffer and 61 % with "
            "one",
            "in figure 18 loading exceeds prefill at 900/100",
            "figure 14's 85 %",
            "| paper (section 4.3.8: 0.5 to 2 sessions a second) | 0.122 to 0.154 | 85 | 6.25 to 7.01 | 4.0 | 70 | "
            "17.6 |",
            "Over 42,000 turns the paper saves 8 to 10 h of TTFT, but 19 to 21 h of GPU time",
            "the paper has 3.4, 1.7, 7.7 and 19.1",
            "From 0.5 to 2 sessions per second the paper's hit rate falls from 82 to 77 %",
            "The paper's own 86 % at rate 1 does not lie between its 82 and 77 %",
        ],
        SETUP: [
            "a turn of 32 tokens behind 4096 of history (189 MB), cold files, and a job of 256 tokens",
            "20 decoded tokens, medians in milliseconds",
            "fill a window of 2048 tokens and go on for 1024 in turns of 512; 95 % intervals over texts",
            "new tokens begin at position 1024, while keys are still rotated to 1024 to 2047",
            "whatever the model's window (8192 here)",
            "The figure and the table are for LLaMA-13B, 128 GB of host memory, the drawn trace, seed 0, and turns "
            "after the first "
            "10,000",
            "| hit rate (host memory alone) | paper 2 TB | ours | `arrivals=anytime` | paper 10 TB |",
            "**Not reproduced**: at 10 TB",
            "At 10 TB every returning turn hits",
            "LRU and FIFO at 10 TB",
            "with 10 GB of device and 128 GB of host memory",
        ],
        MEANING: [
            "128 GB with 10 of them in reserve",
            "A session is kept in blocks of `block_tokens` (256)",
            "about 200 bytes per tensor",
            "`lost_turns` is 1 in its record",
            "when `hold` returns (256 MB)",
            "`io_threads` (2) read for jobs that wait",
            "With 0 the caller does everything itself",
            "`overflow.ratio` (0.5) of the history stays",
            "at positions 0 to H-1",
            "rotated to 0 to H-1",
            "leaves the text's first 4 in their place",
            "128GiB is binary",
            "(4 characters count as a token)",
            "the runs of one figure (13 to 17, 21, 22, 24, 25)",
            "more than 10 points from the paper",
            "and 22; `disk_duplex`",
        ],
        ARITHMETIC: [
            "so one GPU takes 0.0002 s per token of 13B",
            "Our prefill takes 6 to 8.5 times as long",
            "together need a TTFT of 0.8 to 1.0 s with recomputation",
            "GPU time speedups of 4.0, 1.9, 3.3 and 3.4 save 70, 42, 67 and 68 % at the printed prices",
            "comes within 2 points of the paper's",
        ],
    },
    "docs/benchmarks.md": {
        SETUP: [
            "64 new tokens",
            "32 query and 8 KV heads of 128, bf16, budget 2048",
            "budget 0.5, our prompt whole and in chunks of 300",
            "with a window of 16 and votes averaged over 31",
            "two of four under Quest, two of 32 in the model",
            "on a machine with 24 GB to itself, at most 20 minutes each",
        ],
        MEANING: [
            "the median with its 95 % interval",
            "above 1, ours is faster",
            "exceeds 100 %",
            "waited for more than 2 % of the time",
            "Steps are timed at 1, 2, 4, ... sequences",
            "within 0.85 to 1.20 times their replay",
            "within 1e-5 of the lowest that stays",
        ],
    },
    "docs/comparison.md": {
        PAPER: [
            "+3.9 points at 1/5, +6.2 at 1/10 over the best",
            "2.2 to 3.0 times Full's throughput on an A100 (60K to 244K tokens, batches 10 to 50)",
            "(the paper's setting at 1/128)",
            "the paper's heads have 128",
            "the paper's 160 of 1024",
            "counts a budget of 20 % of the prompt as a compression of 2.5",
            "a compression of 400",
        ],
        SETUP: [
            "The needles are 7-digit numbers",
            "in steps of 500 words",
            "or a window of 32 (SnapKV)",
            "The first 8 rows of each of the 8 MiniLongBench sets",
            "the last 256 of each scored",
            "5 depths",
            "(commit 77274b1, Quest 595f19d)",
            "| method | 10 % | 20 % |",
            "(as above, alpha=99)",
            "Neither 256 centroids (b=8)",
            "A share of 0.2 in the columns of queries and of keys is at most 24 of 64 channels",
            "through its chunks of 8",
            "Rank 30 of 192 key channels",
        ],
        MEANING: [
            "a vote reaches 3 digits to either side",
            "stays below 100",
            "with a floor of 1 it is SnapKV",
            "found with 80 % power",
            "With a floor of 1 all heads",
        ],
        ARITHMETIC: [
            "SparQ (16 of 64 channels)",
            "reads 16 of 64 channels, a quarter",
            "take 1/64 of the keys",
            "At 1/64 SparQ reads one channel (r=1)",
            "there SparQ reads four times as much as here at 1/16",
        ],
    },
    "docs/kernels.md": {
        SETUP: [
            "sm_80, 89, 90, 100 and 120",
            "at a budget of 0.2 behind",
            "| method | 1 sequence | 4 sequences | 8 sequences |",
            "32 query and 8 KV heads of 128, 65,536 tokens, groups of 32",
            "are 1. | codes |",
            "three channels lie 9 higher, and values, 4096 tokens, 8 heads of 128",
            "Triton 3.7.1 has compiled these kernels",
        ],
        MEANING: [
            "2.6.1 or newer",
            "Each size must be at least 1",
            "64 bytes, one cache line: 16 floats, or 32 bf16 as 16 words of two",
            "32 rows at a time",
            "Up to 8 query heads of a group share one read",
            "tiles of 4 rows times up to 4 vectors",
            "in blocks of 64",
            "panels of 32 outputs",
            "(512 bytes wide per channel)",
            "medians with 95 % intervals",
            "more than 32,768 candidates",
            "more than 4,096 landmarks",
            "no multiple of 16 bytes",
            "(512 bytes a head, 64 query heads)",
            "by a table of 256 floats",
        ],
        TESTED: ["below 1e-5 in fp32"],
        MAKER: ["multiplies 32 x 32 outputs at a time from four tiles of 16 x 64 bytes", "A100 163 KiB, H100 227"],
    },
    "docs/plan.md": {
        MEANING: ["for the others 0"],
    },
    "docs/tuning.md": {
        PAPER: ["**SnapKV's kernel** is 7 in its paper", "are a share of 0.2 in its paper"],
        SETUP: ["over the 7 digits of a needle"],
        MEANING: ["the curves with 95 % intervals", "with a floor of 1, which gives all heads the same share"],
    },
    "docs/tasks.md": {
        PAPER: ["the 13 tasks of RULER", "makes the 13 tasks"],
        MAKER: [
            "(361 MB; `task.tasks=all`)",
            "a task of lm-evaluation-harness 0.4.13",
            "What 0.4.13 brings",
            "bAbI's facts in a haystack, to 128K",
            "twelve tasks of 100K tokens and more",
            "0.5K to 8K tokens",
        ],
        MEANING: ['a bracket scores 1 on "(B)"'],
    },
    "docs/triage.md": {
        MEANING: [
            "in at most 4 places",
            "the scorer gives less than 1",
            "(the first 32)",
            "2, since the prefill gives the first token (1 under `protocol=context`)",
        ],
    },
    "docs/budgets.md": {
        PAPER: ["(1/128) is the setting of PQCache's comparison"],
        MEANING: [
            "The command line's default is 0.2",
            "sinks, 0 by default",
            "the share of the 16-bit keys",
            "(m=2, b=6 at 1/128; m=4, 8, 16 with b=8 from 1/64 to 1/16, at head size 128)",
            "(1/128 alone)",
        ],
    },
    "docs/commands.md": {SETUP: ["sends 52,000 turns"]},
    "docs/multiturn.md": {
        SETUP: ['"The special magic Prague number is: 4818628."'],
        MEANING: ["at most 32K", "the shares above 2K and 4K (before scaling)"],
    },
    "docs/presses.md": {MAKER: ["transformers below 5.3"]},
    "docs/report.md": {
        MEANING: [
            "differ by at most 25 points",
            "(p ≥ 0.05)",
            "Of more than 20 rows it shows 12",
            "more than 12 runs",
            "cut after 4000 characters, and a page holds 8 million in all",
            "at most 1 point below Full",
        ],
    },
    "docs/results.md": {
        SETUP: ["A budget of 10 % says"],
        MEANING: [
            "`score` (0-1)",
            "lie between 0 and 1",
            "The 95 % interval of a score",
            "p < 0.05 exactly when the interval excludes 0",
            "From 6 units on there is an interval",
            "would find with 80 % power",
            "could not reach p < 0.05",
            "a loss of 10 and of 5 points",
            "none 0 or 1",
            "(0 included)",
            "when token 1 is on the host, `TT2T` when token 2 is",
            "1 if its history was stored",
            "8 bytes a row",
            "(1, 2, 4, 8 and so on)",
            "(A torch older than 2.12",
        ],
        TESTED: [
            "in at least 93 % of samples",
            "from 6 units on, for differences",
            "within 10 % of what is allocated, above 16 MiB",
        ],
    },
    "docs/serving.md": {
        MEANING: [
            "| `rate` | 1 |",
            "| `think_s` | 5 |",
            "| `slots` | 4 |",
            "about 0 behind the last turn",
            "are within 10 %",
        ],
        ARITHMETIC: ["more than 8 minutes for 100 sessions at 0.2 per second"],
    },
    "docs/trust.md": {
        SETUP: ["the score on 10 needles in 512 and 1024 tokens", "the answers to 3 needles"],
        MEANING: [
            "the exit code is then 1",
            "in the 95 % interval of the recorded score",
            "is within 0.2 % of the recorded one",
            "is within 1 % of the recorded one",
            "(540 MB)",
            "The intervals are at 90 %",
        ],
        TESTED: ["of 200 simulated tables at most 16 raise any alarm"],
    },
    "docs/methods.md": {
        PAPER: [
            "s/256 (`bytes`, since the others' extra transfer is 1/128 of the keys alone)",
            "(OSDI'24,",
            "ICML'24)",
            "SIGMOD'25)",
            "which gets 1/beta of their mean",
            "where SnapKV takes 32",
            "reads no less than 3 pages whatever the budget",
            "the paper's t = 2b",
            "null is the paper's min(0.2 + 0.06 log2 c, 0.8)",
            "the paper's 2048 retrieved tokens",
            "PyramidKV's scripts take 8",
        ],
        MEANING: [
            "all stood n_local - 1 before the query",
            "into 2^b centroids",
            "codes are one byte up to b=8",
            "At budget=2464 the defaults give",
            "32 bytes for each",
        ],
        ARITHMETIC: [
            "18 % more than a budget of",
            "4 % more than one of 263",
            "42 in place of 21",
            "from 19 % of the prompt on, a page has one token, and from 50 % on",
            "for 1.5 times the memory",
        ],
    },
}
