"""train_glue.py or train_cifar.py with plain torch in the engine's place, on one process: same data, order, schedule, evaluation.

    python benchmarks/plain.py glue --task mrpc --data DIR --model DIR --lr 9.6e-5 --no_scale_lr --precision bf16
    python benchmarks/plain.py cifar --data DIR -i 0 --precision fp16

What a strategy reaches is put beside what this prints. Options are the script's.
"""
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import ddp  # noqa: E402
import train_cifar  # noqa: E402
import train_glue  # noqa: E402


class Plain:
    """The members of an engine that the scripts use, by torch's own AdamW, autocast and gradient scaler."""

    def __init__(self, model, params, *, lr, eps=1e-8, weight_decay=0.0, precision):
        self.model = model
        self.device = next(model.parameters()).device
        self.half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        params = list(model.parameters()) if params is None else params
        self.optimizer = torch.optim.AdamW(params, lr=lr, eps=eps, weight_decay=weight_decay, fused=True)

    def __call__(self, *args, **kwargs):
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            return self.model(*args, **kwargs)

    def train(self):
        self.model.train()

    def eval(self):
        self.model.eval()

    def forward_backward(self, batch, micro_batches=1, loss_fn=None):
        assert micro_batches == 1, "plain torch takes the batch whole"
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            loss = loss_fn(self.model(batch[0]), batch) if loss_fn else self.model(**batch).loss
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    scripts = {"glue": train_glue, "cifar": train_cifar}
    if len(sys.argv) < 2 or sys.argv[1] not in scripts:
        raise SystemExit(__doc__)
    train_glue.MODES["plain"] = train_glue.Mode("ddp", "Plain", "fp32")
    train_glue.load_engine = lambda args: (ddp, Plain, {})
    scripts[sys.argv[1]].main([*sys.argv[2:], "--mode", "plain"])
