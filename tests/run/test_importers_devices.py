"""How many devices a label states, and which, in the wordings of people."""

from __future__ import annotations

import pytest

from bench.importers.labels import facts_of


@pytest.mark.parametrize(
    ("label", "ranks", "device"),
    [
        ("main (8x H100, Llama 8B, sequence length 4096)", 8, "H100"),
        ("8 x H100 80GB", 8, "H100 80GB"),
        ("8xH100", 8, "H100"),
        ("8\N{MULTIPLICATION SIGN}H100", 8, "H100"),
        ("8xH100-80GB", 8, "H100-80GB"),
        ("8 H100 GPUs", 8, "H100"),
        ("8 H100s", 8, "H100"),
        ("16 NVIDIA B200s", 16, "NVIDIA B200"),
        ("8 GPUs, H100", 8, "H100"),
        ("H100, 8 GPUs", 8, "H100"),
        ("H100 x8", 8, "H100"),
        ("8 GPUs", 8, None),
        ("1024 ranks", 1024, None),
        ("8 devices", 8, None),
        ("world size 8", 8, None),
        ("world_size=16", 16, None),
        ("ngpu: 4", 4, None),
        ("1 node of 8 H100", 8, "H100"),
        ("2 nodes x 8", 16, None),
        ("2 nodes x 8 MI300X", 16, "MI300X"),
        ("4 nodes with 8 GPUs", 32, None),
        ("2 nodes, 8 GPUs per node, A100-SXM4-80GB", 16, "A100-SXM4-80GB"),
        ("2x8 H100", 16, "H100"),
        ("2 nodes, 16 GPUs", 16, None),
        ("GB200 NVL72, 64 GPUs", 64, "GB200 NVL72"),
        # What is no count of devices, or two of them.
        ("HFSDP 4-Node", None, None),
        ("8x faster on H100", None, "H100"),
        ("8 GPUs per node", None, None),
        ("Llama 8B @ SeqLen 1K", None, None),
        ("8 GPUs against 16 GPUs", None, None),
        ("micro batch 8, H100 and H200", None, None),
        ("v2.8 H100", None, "H100"),
        ("ZeRO-3 H100", None, "H100"),
        ("B16 and A2A", None, None),
    ],
)
def test_the_count_and_the_name_are_read_from_a_label(label, ranks, device):
    found = facts_of(label)
    assert (found.get("ranks"), found.get("device")) == (ranks, device)


NEGATED = {
    "HSDP, not seq 4096 but 2048, GBS 128": {"seq_len": 2048, "global_batch": 128},
    "not seq=4,096 but 2,048 and GBS 128": {"seq_len": 2048, "global_batch": 128},
    "seq 2048 (not seq 4096)": {"seq_len": 2048},
    "seq_len 2048 instead of seq_len 4096": {"seq_len": 2048},
    "not seq 4096": {},
    "batch: not global batch 64, micro batch 2": {"micro_batch": 2},
    "not 8 GPUs but 16": {"ranks": 16},
    "not 8x H100 but 16x H100": {"ranks": 16, "device": "H100"},
    "not Llama 8B but Llama 70B": {"model": "Llama 70B"},
    "does not fit at seq 4096": {"seq_len": 4096},
}


def test_a_negated_number_is_not_taken():
    assert {label: facts_of(label) for label in NEGATED} == NEGATED
