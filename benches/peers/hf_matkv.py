"""Transformers doing what MatKV's published code does, for `matkv bench peers`.

    hf_matkv.py JOB.json

The job names a GGUF model, a directory, and the token ids of a prompt: prefix, chunks, question.
Past keys and values of the prefix and of every chunk are computed, each on its own, and written to
the directory. Then a line says which data type is used, and every line on standard input is
answered with the milliseconds of one request: evict the files from the page cache (not counted),
load them, concatenate them, prefill the question over them, choose the first token.

Speed only: chunks keep the positions they were computed at, as in the published code.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def evict(path):
    """Takes a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def pairs(cache):
    """Keys and values of every layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def materialize(model, tokens, path):
    """Computes a part's past keys and values and writes them."""
    ids = torch.tensor([tokens])
    cache = model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    torch.save([(k.contiguous(), v.contiguous()) for k, v in pairs(cache)], path)


def request(model, paths, question):
    """Milliseconds from loading to the first token."""
    started = time.perf_counter()
    parts = [torch.load(path, weights_only=True) for path in paths]
    cache = DynamicCache()
    for layer, kv in enumerate(zip(*parts)):
        keys = torch.cat([k for k, _ in kv], dim=2)
        values = torch.cat([v for _, v in kv], dim=2)
        cache.update(keys, values, layer)
    past = cache.get_seq_length()
    ids = torch.tensor([question])
    positions = torch.arange(past, past + len(question)).unsqueeze(0)
    out = model(ids, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1)
    out.logits[0, -1].argmax().item()
    return (time.perf_counter() - started) * 1e3


def faster(load, question):
    """The data type in which a prefill of the question is faster, and the model in it."""
    best = None
    for dtype in (torch.bfloat16, torch.float32):
        model = load(dtype)
        ids = torch.tensor([question])
        spent = []
        for _ in range(3):
            started = time.perf_counter()
            model(ids, use_cache=False)
            spent.append(time.perf_counter() - started)
        if best is None or min(spent) < best[0]:
            best = (min(spent), dtype, model)
    return best[1], best[2]


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(False)
    gguf = Path(job["model"])

    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=dtype, local_files_only=True
        ).eval()

    dtype, model = faster(load, job["rest"])
    paths = []
    for i, tokens in enumerate([job["prefix"], *job["chunks"]]):
        paths.append(Path(job["dir"]) / f"part-{i}.pt")
        materialize(model, tokens, paths[-1])
    request(model, paths, job["rest"])
    total = sum(path.stat().st_size for path in paths)
    print(f"{dtype}, {total / 1e6:.1f} MB on disk, torch {torch.__version__}", flush=True)
    for _ in sys.stdin:
        for path in paths:
            evict(path)
        print(request(model, paths, job["rest"]), flush=True)


if __name__ == "__main__":
    main()
