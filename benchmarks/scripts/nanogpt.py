"""nanoGPT's train.py, from the clone in $NANOGPT with data/shakespeare_char prepared, on the CPU
with gloo and a tiny model. Reports its first step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from report import report

NANOGPT = Path(os.environ["NANOGPT"])
WORDS = (
    *("--backend=gloo", "--device=cpu", "--dtype=float32", "--compile=False", "--block_size=64"),
    *("--n_layer=4", "--n_head=4", "--n_embd=128", "--batch_size=8", "--eval_iters=1"),
    *("--gradient_accumulation_steps=2", "--log_interval=1000000", "--eval_interval=1000000"),
    *("--dropout=0.1", f"--dataset={NANOGPT}/data/shakespeare_char"),
)
CHANGES = {
    "f'cuda:{ddp_local_rank}'": "'cpu'",
    "    torch.cuda.set_device(device)\n": "",
    "device_ids=[ddp_local_rank]": "",
    "    local_iter_num += 1\n": "    local_iter_num += 1\n    _first_step()\n",
}

reported = False


def _first_step() -> None:
    global reported
    if not reported:
        reported = True
        report("allreduce")


text = (NANOGPT / "train.py").read_text()
for old, new in CHANGES.items():
    assert text.count(old) == 1, f"nanoGPT has changed: {old}"
    text = text.replace(old, new)
sys.argv[1:] = [*WORDS, f"--out_dir={os.environ['BENCH_STEPS']}"]
sys.path.insert(0, str(NANOGPT))
os.chdir(NANOGPT)
exec(compile(text, str(NANOGPT / "train.py"), "exec"))
