"""Train a ResNet-18 or a small vision transformer on CIFAR-10. The loop is the same for every strategy; `--mode` picks it.

    python train_cifar.py                                                       # one process, mode ddp, 80 epochs
    torchrun --standalone --nproc_per_node 2 train_cifar.py --data builtin --epochs 2 -i 0    # two ranks; CPUs will do
    torchrun --standalone --nproc_per_node 8 train_cifar.py -p ddp_fp16 --stem cifar          # a GPU each
    python train_cifar.py -r 40                                                 # go on after epoch 40
    python train_cifar.py --eval -e 80                                          # only evaluate model_80.pth

Who computes what, with N data-parallel ranks of b images each (--batch_size), B = N*b in a step:

    training    order, flips and crops of one epoch = random numbers from (seed, epoch), drawn for all images on every rank
                step g             = images order[g*B : (g+1)*B]      the last, incomplete ones are dropped
                rank r             = the r-th of N equal slices of it
                So 1 rank of 200 and 2 ranks of 100 see the same crops, and a resumed run goes on where it was.
    evaluation  units of 100 consecutive images; rank r takes units r, r+N, r+2N, ...; the logits of all units go to every
                rank. Each image counts once, and in the same unit whatever N is: the accuracy does not depend on N.

    images      uint8 on the device, the whole split: 154 MB for CIFAR-10's 50,000 training images. A batch is cut out of
                it there, by indexing: no loader processes, and nothing that the host does image by image.

Files, in --checkpoint, after every --interval epochs and after the last:

    model_{e}.pth          the plain model's state dict, for whoever wants the weights, and for --eval
    lr_scheduler_{e}.pth   the schedule's state
    optimizer_{e}/         written last and all that --resume reads: the sharded checkpoint of the strategy, which has weights,
                           moments, buffers, loss scale, random states, schedule, epoch, and the settings of the run

One run, and the sections of this file:
    1. arguments
    2. data: CIFAR-10 as torchvision stores it, folders of image files, or a download
    3. built-in images: ten shapes
    4. batches: order, flips, crops
    5. model
    6. evaluation
    7. checkpoints
    8. the run

A bad argument ends every rank with exit status 2 (of which torchrun itself makes 1), a failure or a missed
--target_acc with 1.
"""

import argparse
import fcntl
import math
import os
import random
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from train_glue import (
    Graph,
    Parser,
    Stop,
    accuracy,
    answers,
    ask_rank_0,
    build_engine,
    check_options,
    data_parallel_ranks,
    evaluation_loss,
    json_line,
    launch,
    logits_of_units,
    on_all_ranks,
    share_of,
    strategy_options,
    train_steps,
    training_rows,
)

LR, EPOCHS, BATCH_SIZE = 1e-3, 80, 100  # learning rate and batch size per data-parallel rank
MILESTONES, GAMMA = (20, 40, 60, 80), 1 / 3  # after these epochs the learning rate is multiplied by GAMMA
SIDE, PAD = 32, 4  # pixels of an image's side, and of the black border from which training crops are cut
UNIT = 100  # images evaluated together
MAX_CLASSES = 10
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# ---- 1. arguments --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(description="Train a ResNet-18 or a small ViT on CIFAR-10 with one of the strategies.", allow_abbrev=False)
    p.add_argument("--data", default="auto",
                   help="builtin: made-up images of ten shapes; a folder: cifar-10-batches-py/ in it, as torchvision stores "
                   "CIFAR-10, or train/CLASS/ and test/CLASS/ with image files of 32 x 32 pixels; auto (default): the folder "
                   "$DATA, or ./data, with CIFAR-10 downloaded to it if it holds neither; builtin if the server does not "
                   "answer in 4 s")
    p.add_argument("--model", default="resnet18", choices=["resnet18", "vit"],
                   help="vit: 4 x 4 patches, 6 layers of 6 heads, width 192; default resnet18")
    p.add_argument("--stem", choices=["imagenet", "cifar"],
                   help="how the ResNet begins: imagenet (default), torchvision's 7x7 convolution of stride 2 and max-pool; "
                   "cifar, a 3x3 convolution of stride 1, for feature maps four times as wide and high")
    p.add_argument("--epochs", type=int, default=EPOCHS, help=f"default {EPOCHS}")
    p.add_argument("--batch_size", type=int, default=BATCH_SIZE,
                   help=f"images per step and data-parallel rank (train_glue.py: of all ranks together); default {BATCH_SIZE}")
    p.add_argument("--lr", type=float, help="learning rate per data-parallel rank: it is multiplied by their number, and by "
                   f"1/3 after epochs {', '.join(map(str, MILESTONES))}; default {LR:g}")
    p.add_argument("--sync_bn", action="store_true", help="batch normalisation over the samples of all ranks; default off")
    p.add_argument("-c", "--checkpoint", default="./checkpoint", metavar="DIR", help="default ./checkpoint")
    p.add_argument("-i", "--interval", type=int, default=5,
                   help="write a checkpoint, and evaluate, after so many epochs and after the last; 180 MB each for the ResNet; "
                   "default 5, off 0")
    p.add_argument("-r", "--resume", type=int, metavar="EPOCH", help="go on after this epoch's checkpoint; default off")
    p.add_argument("--eval", action="store_true",
                   help="only evaluate model_EPOCH.pth of -e, as a plain model; after a run in half precision repeat its "
                   "--precision: the numbers are then those of the run for ddp, and within rounding for other modes")
    p.add_argument("-e", "--epoch", type=int, help=f"of --eval; default {EPOCHS}")
    p.add_argument("--target_acc", type=float, help="exit with status 1 if accuracy, 0 to 1, ends below this; default off")
    strategy_options(p, "weights, order, flips and crops")
    args = p.parse_args(argv)
    check_options(args, ("epochs", "batch_size", "resume", "epoch"),
                  (("lr", 0, math.inf), ("interval", 0, math.inf), ("target_acc", 0, 1)))
    if args.model == "vit" and (args.stem or args.sync_bn):
        raise Stop(f"--model vit has no {'stem to choose' if args.stem else 'batch normalisation to synchronise'}")
    args.stem = args.stem or ("imagenet" if args.model == "resnet18" else None)
    if args.eval and args.resume:
        raise Stop("--resume goes on with training and --eval does not train: give one of them")
    if args.eval and args.graph:
        raise Stop("--graph is for training steps and --eval takes none: give one of them")
    if args.epoch and not args.eval:
        raise Stop("-e is the epoch of --eval; to go on with training give -r")
    if args.data not in ("auto", "builtin") and layout(args.data) is None:
        raise Stop(f"--data {args.data}: {what_is_in(args.data)}")
    args.checkpoint = Path(args.checkpoint).expanduser()
    if args.resume:
        checkpoint_of(args.checkpoint, args.resume)  # refuses
    if args.eval:
        args.epoch = args.epoch or EPOCHS
        if not (file := args.checkpoint / f"model_{args.epoch}.pth").is_file():
            raise Stop(f"--eval: there is no {file}; {args.checkpoint} has {epochs_in(args.checkpoint, 'model_')}")
    return args


def checkpoint_of(folder: Path, epoch: int) -> Path:
    """Where the checkpoint of an epoch is. Never a fresh start instead: without one, Stop."""
    place = folder / f"optimizer_{epoch}"
    if not place.exists() and (old := place.with_name(place.name + ".old")).exists():
        place = old  # a save was killed between its two renames; engine.load, too, looks there
    if not (place / "meta.json").is_file():
        raise Stop(f"-r {epoch}: there is no checkpoint in {place}; {folder} has {epochs_in(folder, 'optimizer_')}")
    return place


def epochs_in(folder: Path, prefix: str) -> str:
    """For messages: 'those of epochs 5, 10', from the names that begin with `prefix`."""
    found = {f.name.removeprefix(prefix).partition(".")[0] for f in folder.glob(f"{prefix}*")}
    return f"those of epochs {', '.join(sorted(found, key=lambda e: (len(e), e)))}" if found else "none"


def check(args, world_size: int) -> None:
    """What can be refused knowing the number of ranks."""
    data_ranks = data_parallel_ranks(args, world_size)
    if args.micro_batches > args.batch_size:
        raise Stop(f"--micro_batches {args.micro_batches} is more than the {args.batch_size} images of a rank")
    # With torchvision's stem the last feature maps of 32 x 32 pixels are 1 x 1: one image is one number per channel.
    alone = args.batch_size // args.micro_batches == 1 and not (args.sync_bn and data_ranks > 1)
    if alone and args.stem == "imagenet" and not args.eval:
        raise Stop(f"--batch_size {args.batch_size} in {args.micro_batches} pieces leaves one image to a piece; batch "
                   "normalisation needs two, or --stem cifar")


# ---- 2. data -------------------------------------------------------------------------------------------------------

NO_DATA = """\
+--------------------------------------------------------------------------------------------------+
|  No CIFAR-10 here, and its server does not answer: training on BUILT-IN images of ten shapes.    |
|  The accuracy is NOT that of CIFAR-10. For real data give --data DIR, or DATA=DIR.               |
+--------------------------------------------------------------------------------------------------+"""


def layout(folder) -> str | None:
    """What a folder holds: cifar10 (as torchvision stores it), folder (of image files by class), or None."""
    where = Path(folder).expanduser()
    if (where / "cifar-10-batches-py").is_dir():
        return "cifar10"
    return "folder" if (where / "train").is_dir() and (where / "test").is_dir() else None


def what_is_in(folder) -> str:
    """For messages about a folder in which `layout` found nothing."""
    where = Path(folder).expanduser()
    if where.is_file():
        return "that is a file; unpack it and give the folder"
    if not where.is_dir():
        return f"there is no folder {where}"
    inside = ", ".join(f.name for f in sorted(where.iterdir())[:12]) or "nothing"
    return f"neither cifar-10-batches-py/ nor train/ and test/ in it; {where} contains {inside}"


def choose_data(args, device) -> tuple[str, str | None]:
    """(builtin, folder, cifar10 or download; the folder), the same on every rank."""
    if args.data == "builtin":
        return "builtin", None
    folder = args.data if args.data != "auto" else os.environ.get("DATA") or "./data"
    # before: each rank knows what its node has.  after: all know of all.  sends: a few bytes; everybody waits.
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, layout(folder))
    if len(set(found)) == 1 and found[0]:
        return found[0], folder
    if args.data == "auto" and "folder" not in found:
        from torchvision.datasets import CIFAR10
        if ask_rank_0(lambda: answers(CIFAR10.url), device):
            return "download", folder
        if not any(found):
            if dist.get_rank() == 0:
                print(NO_DATA, f"looked in {folder}: {what_is_in(folder)}", sep="\n", flush=True)
            return "builtin", None
    raise Stop(f"{folder}: ranks find different things there: "
               + ", ".join(f"{r}: {kind or 'no images'}" for r, kind in enumerate(found)))


def load_data(kind: str, folder: str | None) -> dict[str, tuple[Tensor, Tensor]]:
    """train and test: images (n, 3, 32, 32) uint8, labels (n,) int64."""
    if kind == "builtin":
        return builtin_data()
    return read_folder(Path(folder).expanduser()) if kind == "folder" else read_cifar10(folder, kind == "download")


def read_cifar10(folder: str, download: bool) -> dict[str, tuple[Tensor, Tensor]]:
    from torchvision.datasets import CIFAR10
    where = Path(folder).expanduser()
    try:
        if download:
            where.mkdir(parents=True, exist_ok=True)
            with open(where / "cifar-10.lock", "w") as lock:  # several nodes may have one folder
                fcntl.flock(lock, fcntl.LOCK_EX)
                CIFAR10(where, download=True)
        splits = {split: CIFAR10(where, train=split == "train") for split in ("train", "test")}
    except Exception as error:  # no route, no space, no permission, a checksum that differs, ...
        if download:
            raise Stop(f"{folder}: the download of CIFAR-10 failed: {type(error).__name__}: {error}", status=1) from error
        raise Stop(f"{where / CIFAR10.base_folder}: damaged or incomplete, remove it to have it downloaded again "
                   f"({type(error).__name__}: {error})") from error
    return {split: (torch.from_numpy(s.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(s.targets))
            for split, s in splits.items()}


def read_folder(where: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """train/CLASS/* and test/CLASS/*; classes are numbered in the order of their names."""
    from torchvision.datasets import ImageFolder
    train, test = ({f.name for f in (where / split).iterdir() if f.is_dir()} for split in ("train", "test"))
    if train != test:
        raise Stop(f"{where}: train/ and test/ must have the same classes; only one of them has {', '.join(sorted(train ^ test))}")
    if not 2 <= len(train) <= MAX_CLASSES:
        raise Stop(f"{where}: 2 to {MAX_CLASSES} classes are possible, train/ has {len(train)} folders")
    data = {}
    for split in ("train", "test"):
        try:
            found = ImageFolder(where / split)
        except FileNotFoundError as error:  # a class without images
            raise Stop(f"{where / split}: {error}") from error
        images = torch.empty(len(found), SIDE, SIDE, 3, dtype=torch.uint8)
        for image, (file, _) in zip(images, found.samples, strict=True):
            try:
                picture = found.loader(file)
            except Exception as error:  # what PIL raises for a broken file depends on the format
                raise Stop(f"{file}: cannot be read: {type(error).__name__}: {error}") from error
            if picture.size != (SIDE, SIDE):
                raise Stop(f"{file}: {picture.width} x {picture.height} pixels instead of {SIDE} x {SIDE}")
            image.copy_(torch.from_numpy(np.array(picture)))
        data[split] = images.permute(0, 3, 1, 2).contiguous(), torch.tensor(found.targets)
    return data


# ---- 3. built-in images --------------------------------------------------------------------------------------------

# A class is a shape: where it is, as a function of the distance (u, v) from its centre in units of its size, v downwards.
# Size, place and both colours are random, so colour does not tell the class (test_cifar.py::test_builtin_colours), and a
# mirrored shape is of the same class.


def within(u, v):
    return np.maximum(abs(u), abs(v)) < 1


SHAPES = {
    "disc": lambda u, v: u**2 + v**2 < 1,
    "ring": lambda u, v: (u**2 + v**2 < 1) & (u**2 + v**2 > 0.3),
    "square": lambda u, v: within(1.1 * u, 1.1 * v),
    "diamond": lambda u, v: abs(u) + abs(v) < 1.2,
    "triangle": lambda u, v: (v < 0.8) & (v + 1 > 1.8 * abs(u)),
    "plus": lambda u, v: within(u, v) & (np.minimum(abs(u), abs(v)) < 0.3),
    "cross": lambda u, v: within(u, v) & (abs(abs(u) - abs(v)) < 0.35),
    "level bars": lambda u, v: within(u, v) & (2.5 * v % 2 < 1),
    "upright bars": lambda u, v: within(u, v) & (2.5 * u % 2 < 1),
    "checks": lambda u, v: within(u, v) & ((1.5 * u % 2 < 1) == (1.5 * v % 2 < 1)),
}


def builtin_images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """n images, as many of each shape as of any other."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % len(SHAPES))
    size, x, y = rng.uniform([[6], [11], [11]], [[11], [21], [21]], (3, n))[..., None, None]  # in pixels, (n, 1, 1) each
    pixel = np.arange(SIDE) + 0.5
    u, v = np.broadcast_arrays((pixel - x) / size, (pixel[:, None] - y) / size)
    inside = np.empty((n, SIDE, SIDE), bool)
    for k, shape in enumerate(SHAPES.values()):
        inside[labels == k] = shape(u[labels == k], v[labels == k])
    # The shape is lighter than the background, by 80 to 160 in a direction of its own. Where it may also be darker, two
    # epochs are not enough for a ResNet-18 to see edges.
    lighter = abs(rng.normal(size=(n, 3)))
    lighter *= rng.uniform(80, 160, (n, 1)) / np.linalg.norm(lighter, axis=1, keepdims=True)
    background, lighter = rng.uniform(20, 120, (n, 3)).astype(np.float32), lighter.astype(np.float32)
    images = 16 * rng.standard_normal((n, 3, SIDE, SIDE), dtype=np.float32)  # noise
    images += background[..., None, None] + inside[:, None] * lighter[..., None, None]
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels)


def builtin_data() -> dict[str, tuple[Tensor, Tensor]]:
    """The same on every rank and in every run, whatever --seed is."""
    return {"train": builtin_images(10000, seed=1), "test": builtin_images(1000, seed=2)}


# ---- 4. batches: order, flips, crops -------------------------------------------------------------------------------


def plan_epoch(examples: int, batch_size: int, seed: int, epoch: int, rank: int, ranks: int) -> tuple[np.ndarray, ...]:
    """Of each image that `rank` takes in each step: its row, whether it is mirrored, where the crop begins; the shapes
    are (steps, batch_size / ranks), the same, and (steps, batch_size / ranks, 2). batch_size: of all ranks together."""
    rng = np.random.default_rng([seed, epoch, 1])  # training_rows draws from [seed, epoch]
    flips, corners = rng.random(examples) < 0.5, rng.integers(2 * PAD + 1, size=(examples, 2))
    return (training_rows(examples, batch_size, seed, epoch, rank, ranks),
            share_of(flips, batch_size, rank, ranks), share_of(corners, batch_size, rank, ranks))


def augment(images: Tensor, flips: Tensor, corners: Tensor) -> Tensor:
    """(n, 3, 32, 32) uint8 -> the same in [0, 1]: four black pixels all round, mirrored where flips (n,) says so, and cut
    to 32 x 32 from row and column corners (n, 2), 0 to 8."""
    padded = F.pad(images, (PAD,) * 4)  # (n, 3, 40, 40)
    pixel = torch.arange(SIDE, device=images.device)
    y, x = corners[:, :1] + pixel, corners[:, 1:] + pixel  # (n, 32) each: rows and columns of `padded`
    x = torch.where(flips[:, None], SIDE + 2 * PAD - 1 - x, x)
    n, channel = (torch.arange(size, device=images.device) for size in images.shape[:2])
    return scaled(padded[n[:, None, None, None], channel[:, None, None], y[:, None, :, None], x[:, None, None, :]])


def scaled(images: Tensor) -> Tensor:
    return images.float() / 255


def training_batches(split: tuple[Tensor, Tensor], *plan_arguments):
    """The batches (images, labels) of a rank in one epoch. The plan goes to the device once: no step waits for the host."""
    images, labels = split
    plan = plan_epoch(len(labels), *plan_arguments)
    for rows, flips, corners in zip(*(torch.from_numpy(part).to(images.device) for part in plan), strict=True):
        yield augment(images[rows], flips, corners), labels[rows]


# ---- 5. model ------------------------------------------------------------------------------------------------------


def build_model(name: str, stem: str | None, classes: int) -> nn.Module:
    if name == "vit":
        import transformers
        return transformers.ViTForImageClassification(transformers.ViTConfig(
            image_size=SIDE, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=classes))
    from torchvision.models import resnet18
    model = resnet18(num_classes=classes)
    if stem == "cifar":  # the first block sees 32 x 32 instead of 8 x 8
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
        model.maxpool = nn.Identity()
    return model


def logits_in(output) -> Tensor:
    """transformers wraps them, torchvision does not."""
    return getattr(output, "logits", output)


def loss_fn(output, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits_in(output).float(), batch[1])  # in fp32, also where a strategy's model is in half precision


# ---- 6. evaluation -------------------------------------------------------------------------------------------------


def evaluate(model, split: tuple[Tensor, Tensor], data_rank: int, data_ranks: int, half=None) -> dict[str, float]:
    """Mean loss and accuracy over a split, the same numbers on every rank. model: an engine, or a module, then under autocast
    to `half` if that is given."""
    images, labels = split

    def forward(rows):
        with torch.autocast(images.device.type, half, enabled=half is not None):
            return logits_in(model(scaled(images[torch.from_numpy(rows).to(images.device)])))

    model.eval()
    unit = min(UNIT, len(labels))
    logits, labels = logits_of_units(forward, len(labels), data_rank, data_ranks, unit, "test"), labels.cpu().numpy()
    return {"loss": evaluation_loss(logits, labels), "accuracy": accuracy(logits.argmax(1), labels)}


# ---- 7. checkpoints ------------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Before the first epoch and not after the fifth: a place where nothing can be written is a bad argument."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Stop(f"-c {folder}: {error}") from error


def write_file(file: Path, content) -> None:
    """torch.save that leaves either the old file or the new one, whenever it is interrupted."""
    new = file.with_name(file.name + ".tmp")
    with open(new, "wb") as f:
        torch.save(content, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, file)
    folder = os.open(file.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name too
    os.close(folder)


def save_checkpoint(engine, scheduler, folder: Path, epoch: int, settings: dict) -> None:
    """Write the three files of an epoch; a collective. optimizer_{e} comes last: if it is there, so are the others."""
    weights = engine.state_dict()  # whole, on rank 0

    def write():
        if dist.get_rank() == 0:
            write_file(folder / f"model_{epoch}.pth", weights)
            write_file(folder / f"lr_scheduler_{epoch}.pth", scheduler.state_dict())

    on_all_ranks(write, node_first=False)
    engine.save(str(folder / f"optimizer_{epoch}"), scheduler=scheduler, epoch=epoch, settings=settings)


def check_settings(args, settings: dict) -> None:
    """Stop where --resume would go on with other settings than the run began with. Not among them, and free to change: the
    number of ranks, mode, precision and micro-batches. lr counts only if the command line names one: else the saved one goes on,
    on however many ranks."""
    file = checkpoint_of(args.checkpoint, args.resume) / "extra.pt"  # before engine.load, which would speak of shapes first
    try:
        saved = torch.load(file, weights_only=True)["settings"]
    except Exception as error:
        raise Stop(f"{file}: cannot be read: {type(error).__name__}: {error}", status=1) from error
    differ = [f"{name} was {saved.get(name)}, is {value}" for name, value in settings.items() if saved.get(name) != value
              and (name != "lr" or args.lr is not None or args.no_scale_lr)]
    if differ:
        raise Stop(f"-r {args.resume}: {file.parent} is of a run with other settings: {'; '.join(differ)}")


def load_weights(model: nn.Module, file: Path, description: str) -> None:
    """Load a model_{e}.pth; Stop if it is damaged or of another model than the one described."""
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on where the file ends
        raise Stop(f"{file}: cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    shapes = {name: tuple(value.shape) for name, value in weights.items()} if isinstance(weights, dict) else {}
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    differ = [f"{name} is {shapes.get(name, 'missing')} instead of {wanted.get(name, 'missing')}"
              for name in sorted(wanted.keys() | shapes.keys()) if shapes.get(name) != wanted.get(name)]
    if differ:
        raise Stop(f"{file} is not of {description}: {differ[0]}" + (f", and {len(differ) - 1} more" if differ[1:] else ""))
    model.load_state_dict(weights)


# ---- 8. the run ----------------------------------------------------------------------------------------------------


def run(args, engine_class, knobs: dict, device) -> None:
    """Train and evaluate, or with --eval only that; called on every rank with the process group in place."""
    torch.backends.cudnn.deterministic = True  # else the gradient of a convolution may add up in another order each time
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None
    # The data axis is the outermost one: ranks that hold one copy of the model together are neighbours.
    data_rank, data_ranks = rank // args.copy_ranks, world_size // args.copy_ranks
    kind, folder = choose_data(args, device)
    data = on_all_ranks(lambda: load_data(kind, folder), node_first=kind == "download")
    kind = "cifar10" if kind == "download" else kind
    checksum = same_everywhere(data, folder)
    data = {split: (images.to(device), labels.to(device)) for split, (images, labels) in data.items()}
    classes, examples = int(data["train"][1].max()) + 1, len(data["train"][1])
    torch.manual_seed(args.seed)  # every rank builds the same model
    model = build_model(args.model, args.stem, classes).to(device)
    description = args.model + (f" with the {args.stem} stem" if args.stem else "") + f" and {classes} classes"
    say(f"{'built-in images' if kind == 'builtin' else folder}: {examples} training and {len(data['test'][1])} test images | "
        f"{description}, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    result = {"model": args.model, "stem": args.stem, "mode": args.mode, "precision": args.precision, "world_size": world_size,
              "data": kind, "classes": classes, "epochs": args.epoch, "samples_per_second": None, "train_loss": None}
    if args.eval:
        file = args.checkpoint / f"model_{args.epoch}.pth"
        on_all_ranks(lambda: load_weights(model, file, description), node_first=False)
        result |= evaluate(model, data["test"], data_rank, data_ranks, HALF[args.precision])
    else:
        settings = {"model": args.model, "stem": args.stem, "data": kind, "training images": examples, "checksum": checksum,
                    "classes": classes, "seed": args.seed, "images per step": args.batch_size * data_ranks,
                    "sync_bn": args.sync_bn, "lr": f"{LR if args.lr is None else args.lr:g}{' x ranks' * (not args.no_scale_lr)}"}
        result |= train(args, engine_class, knobs, model, data, settings, data_rank, data_ranks, say)
    say(json_line(result), flush=True)
    if args.target_acc is not None and result["accuracy"] < args.target_acc:
        raise Stop(f"accuracy {result['accuracy']} is below the target {args.target_acc}", status=1)


def same_everywhere(data: dict[str, tuple[Tensor, Tensor]], folder: str | None) -> str:
    """A checksum of the training split. Stop where the ranks have read different data: nodes may have folders of their own."""
    def crc(split):
        images, labels = data[split]
        return f"{zlib.crc32(labels.numpy(), zlib.crc32(images.numpy())):08x}"

    # before: each rank knows the checksums of what it has read.  after: all know all.  sends: a few bytes; everybody waits.
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (crc("train"), crc("test")))
    if len(set(found)) > 1:
        raise Stop(f"{folder}: ranks have read different images there; checksums are "
                   + ", ".join(f"{rank}: {' '.join(sums)}" for rank, sums in enumerate(found)))
    return found[0][0]


def train(args, engine_class, knobs: dict, model, data, settings: dict, data_rank: int, data_ranks: int, say) -> dict:
    """All epochs that are left. Returns what the JSON line says of training, loss and accuracy."""
    device, examples, batch_size = data["train"][0].device, settings["training images"], settings["images per step"]
    if examples < batch_size:
        raise Stop(f"--batch_size {args.batch_size} on {data_ranks} data-parallel ranks takes {batch_size} images a step, "
                   f"more than the {examples} training images")
    if args.resume:
        on_all_ranks(lambda: check_settings(args, settings), node_first=False)
    if args.interval:
        on_all_ranks(lambda: make_folder(args.checkpoint), node_first=False)
    if args.sync_bn:
        from ddp import sync_batchnorm
        model = sync_batchnorm(model)
    for seed in (torch.manual_seed, random.seed):  # a checkpoint has the state of both
        seed(args.seed + 1000 * (1 + data_rank))  # what is drawn from here on differs between samples
    lr = (LR if args.lr is None else args.lr) * (1 if args.no_scale_lr else data_ranks)
    engine = build_engine(args, engine_class, model, None,
                          **{"lr": lr, "weight_decay": 0.0, "precision": args.precision, **knobs})
    scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, MILESTONES, GAMMA)
    done = 0
    if args.resume:  # weights, moments, running statistics, loss scale, learning rates and, on as many ranks, random numbers
        done = engine.load(str(args.checkpoint / f"optimizer_{args.resume}"), scheduler=scheduler)["epoch"]
    steps, seconds, train_loss, found = examples // batch_size, 0.0, None, None
    graph = Graph(args.mode) if args.graph else None
    if done < args.epochs:
        say(f"mode {args.mode}, {args.precision}, {dist.get_world_size()} ranks on {device.type} | epochs {done + 1} to "
            f"{args.epochs}, {steps} steps of {batch_size} images each, lr {scheduler.get_last_lr()[0]:g}", flush=True)
    else:
        say(f"--epochs {args.epochs} is not past epoch {done}: nothing to train, only evaluating the checkpoint", flush=True)
        found = evaluate(engine, data["test"], data_rank, data_ranks)
    for epoch in range(done, args.epochs):
        start = time.perf_counter()
        batches = training_batches(data["train"], batch_size, args.seed, epoch, data_rank, data_ranks)
        train_loss = train_steps(engine, batches, steps, args.micro_batches, device, f"epoch {epoch + 1}/{args.epochs}", loss_fn,
                                 graph=graph)
        scheduler.step()
        seconds += time.perf_counter() - start
        if epoch + 1 == args.epochs or args.interval and (epoch + 1) % args.interval == 0:
            if args.interval:
                save_checkpoint(engine, scheduler, args.checkpoint, epoch + 1, settings)
            found = evaluate(engine, data["test"], data_rank, data_ranks)
            say(f"epoch {epoch + 1}: training loss {train_loss:.4f}, test loss {found['loss']:.4f}, accuracy {found['accuracy']}",
                flush=True)
    # samples of all ranks per second of training: the first step included; loading, evaluation and checkpoints not
    speed = round((args.epochs - done) * steps * batch_size / seconds, 2) if seconds else None
    return {"epochs": max(done, args.epochs), "samples_per_second": speed, "train_loss": train_loss, **found}


def main(argv: list[str] | None = None) -> None:
    launch("train_cifar.py", argv, parse, check, run)


if __name__ == "__main__":
    main()
