"""train_glue.py with plain torch in the engine's place, on one process: the same data, order, schedule and evaluation.

    python benchmarks/glue.py --task mrpc --data DIR --model DIR --lr 9.6e-5 --no_scale_lr --precision bf16

What a strategy scores on a GLUE task is put beside what this prints. Options are train_glue.py's.
"""
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import ddp  # noqa: E402
import train_glue  # noqa: E402


class Plain:
    """The members of an engine that train_glue.py uses, by torch's own AdamW, autocast and gradient scaler."""

    def __init__(self, model, params, *, lr, eps, precision):
        self.model = model
        self.device = next(model.parameters()).device
        self.half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.optimizer = torch.optim.AdamW(params, lr=lr, eps=eps, fused=True)

    def __call__(self, **batch):
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            return self.model(**batch)

    def train(self):
        self.model.train()

    def eval(self):
        self.model.eval()

    def forward_backward(self, batch, micro_batches=1):
        assert micro_batches == 1, "plain torch takes the batch whole"
        loss = self(**batch).loss
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    train_glue.MODES["plain"] = train_glue.Mode("ddp", "Plain", "fp32")
    train_glue.load_engine = lambda args: (ddp, Plain, {})
    train_glue.main([*sys.argv[1:], "--mode", "plain"])
