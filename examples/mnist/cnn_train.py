"""Train a small convolutional network on handwritten digits with DistributedDataParallel, and survive restarts.

    dlrover-run --nproc-per-node=2 --max-restarts=3 cnn_train.py

All it needs from its launcher are the environment variables of torchrun. It resumes from the newest checkpoint with any
number of workers; with the number that it had, the weights come out bit for bit as if nothing had happened (as far as
the backend adds up gradients in a fixed order, which gloo does for two workers).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_run.training import CheckpointDirectory, ElasticBatchSampler, ElasticDistributedSampler

IMAGE_SIZE = 28
PRINT_STEPS = 20
MEAN, SPREAD = 77.0, 89.0
"""The middle and the width of the values of a digit's pixels, roughly."""

Batch = tuple[Tensor, Tensor]


class DigitFolder(Dataset[Batch]):
    """The images below `directory/<digit>/`, grey, scaled to 28 x 28 pixels; read when first asked for, then kept."""

    def __init__(self, directory: Path) -> None:
        # Sorted, because every worker and every later run must number the images alike.
        self._files = sorted(directory.glob("[0-9]/*.png"))
        if not self._files:
            raise SystemExit(f"{directory} holds no images; they should be in {directory}/<digit>/*.png")
        self._images: list[Tensor | None] = [None] * len(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Batch:
        image = self._images[index]
        if image is None:
            image = self._images[index] = read_image(self._files[index])
        return image, torch.tensor(int(self._files[index].parent.name))


def read_image(path: Path) -> Tensor:
    """The image as 28 x 28 bytes."""
    with Image.open(path) as image:
        grey = image.convert("L")
    if grey.size != (IMAGE_SIZE, IMAGE_SIZE):
        grey = grey.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    return torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(1, IMAGE_SIZE, IMAGE_SIZE)


def collate(samples: Sequence[Batch]) -> Batch:
    """One batch of images, scaled to numbers around 0, and labels; a batch of nothing has the same shape."""
    if not samples:
        return torch.empty(0, 1, IMAGE_SIZE, IMAGE_SIZE), torch.empty(0, dtype=torch.long)
    images, labels = zip(*samples, strict=True)
    return (torch.stack(images).float() - MEAN) / SPREAD, torch.stack(labels)


class Net(nn.Module):
    """Two convolutions and two linear layers; nothing that draws random numbers while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (IMAGE_SIZE // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores


@dataclass
class Training:
    """Everything that a checkpoint holds, and the one way to take a step."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    sampler: ElasticDistributedSampler
    checkpoints: CheckpointDirectory
    device: torch.device
    learning_rate: float
    num_epochs: int
    step: int = 0

    def set_learning_rate(self) -> None:
        """Fall linearly to 0, by the share of all samples that is done, so that no change of the world size matters."""
        done = self.sampler.epoch + self.sampler.completed_num / self.sampler.dataset_size
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * max(0.0, 1 - done / self.num_epochs)

    def take_step(self, images: Tensor, labels: Tensor, batch_size: int) -> None:
        """One step with this rank's share of the global batch, which may be empty."""
        global_batch_size = self.sampler.global_batch_size(batch_size)
        loss_sum = functional.cross_entropy(self.model(images.to(self.device)), labels.to(self.device), reduction="sum")
        self.optimizer.zero_grad()
        # DistributedDataParallel divides by the number of ranks, which is right only when all shares are equal.
        (loss_sum * (dist.get_world_size() / global_batch_size)).backward()  # type: ignore[no-untyped-call]
        if self.step % PRINT_STEPS == 0:
            loss = total_over_ranks(loss_sum.detach()) / global_batch_size
            log(f"loss = {loss.item()}, step = {self.step}")
        self.set_learning_rate()
        self.optimizer.step()
        self.sampler.advance(global_batch_size)
        self.step += 1

    def save(self) -> None:
        """Write a checkpoint; only rank 0 does."""
        if dist.get_rank() == 0:
            self.checkpoints.save(
                self.step,
                {
                    "model": self.model.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "sampler": self.sampler.state_dict(),
                },
            )

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        # Rank 0 alone reads, so that all ranks go on from the same checkpoint even where they do not share a disk.
        newest = self.checkpoints.load_latest() if dist.get_rank() == 0 else None
        box: list[Any] = [None if newest is None else (newest.step, newest.state)]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        self.step, state = box[0]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        log(f"resume at step = {self.step}")


def train(training: Training, loader: DataLoader[Batch], validation: Dataset[Batch], args: argparse.Namespace) -> None:
    """Train until `num_epochs` epochs are done, from wherever `training` stands."""
    accuracy: float | None = None
    for epoch in range(training.sampler.epoch, args.num_epochs):
        training.sampler.set_epoch(epoch)
        training.model.train()  # type: ignore[no-untyped-call]
        for images, labels in loader:
            training.take_step(images, labels, args.batch_size)
            if training.step % args.checkpoint_steps == 0:
                training.save()
        training.save()
        accuracy = validate(training.model, validation, args.batch_size, training.device)
        log(f"epoch = {epoch}, accuracy = {accuracy:.4f}")
    if accuracy is None:
        accuracy = validate(training.model, validation, args.batch_size, training.device)
    log(f"final accuracy = {accuracy:.4f}")


@torch.no_grad()
def validate(model: DistributedDataParallel, data: Dataset[Batch], batch_size: int, device: torch.device) -> float:
    """The share of images that the model names rightly; each is looked at once, by one of the ranks."""
    model.eval()
    sampler = ElasticDistributedSampler(data, shuffle=False)  # type: ignore[arg-type]  # DigitFolder has a length
    right = torch.zeros((), dtype=torch.long, device=device)
    for images, labels in DataLoader(data, batch_size, sampler=sampler, collate_fn=collate):
        # The bare module: the ranks may have different numbers of batches here, and nothing needs to be averaged.
        right += (model.module(images.to(device)).argmax(1) == labels.to(device)).sum()
    return total_over_ranks(right).item() / sampler.dataset_size


def total_over_ranks(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


def log(line: str) -> None:
    """Print a line once, not once for each rank."""
    if dist.get_rank() == 0:
        print_line(line)


def print_line(line: str) -> None:
    # In one write, line end included, because all workers may share one pipe; `print` makes two when it is unbuffered.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def digits_of(args: argparse.Namespace) -> tuple[Path, Path]:
    """The training and the validation directory: those given, or scikit-learn's digits, written out by one process."""
    if args.training_data is not None:
        return args.training_data, args.validation_data
    if int(os.environ["LOCAL_RANK"]) == 0:
        # A process of its own, because scikit-learn is big and is needed only this once.
        script = Path(__file__).with_name("write_digits.py")
        subprocess.run([sys.executable, script, args.digits_dir], check=True)
    dist.barrier()
    return args.digits_dir / "training", args.digits_dir / "testing"


@contextlib.contextmanager
def process_group(no_cuda: bool) -> Iterator[torch.device]:
    """Join the other workers, over NCCL when each has a GPU of its own, else over gloo; gives this worker's device."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("no launcher has started this: use dlrover-run --nproc-per-node=2 cnn_train.py")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if not no_cuda and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    print_line(
        f"rank {dist.get_rank()} of {dist.get_world_size()} is initialized: local_rank = {local_rank}, "
        f"device = {device}, pid = {os.getpid()}"
    )
    yield device
    # DistributedDataParallel keeps the group in a cycle. Were that left to the interpreter's end, a thread of the group
    # could want an interpreter that is gone by then, which aborts the process.
    gc.collect()
    # Only after success: a worker that fails must not wait here for others that have failed as well.
    dist.destroy_process_group()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--training_data", type=Path, help="PNG files as <digit>/*.png; default: scikit-learn's digits")
    parser.add_argument("--validation_data", type=Path, help="PNG files as <digit>/*.png")
    parser.add_argument("--digits_dir", type=Path, default=Path("mnist_digits"), help="where these digits are kept")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="samples of one worker in one step")
    parser.add_argument("--learning_rate", type=float, default=0.005, help="at the start; falls linearly to 0")
    parser.add_argument(
        "--checkpoint_dir", type=Path, help="save here and resume from here; default: mnist_checkpoints/JOB"
    )
    parser.add_argument("--checkpoint_steps", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--no_cuda", "--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if (args.training_data is None) != (args.validation_data is None):
        parser.error("give both --training_data and --validation_data, or neither")
    for name in ("num_epochs", "batch_size", "checkpoint_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.checkpoint_dir is None:
        # By job, so that another one begins afresh while a worker or a node that is replaced goes on.
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none").replace("/", "-")
        args.checkpoint_dir = Path("mnist_checkpoints") / job
    return args


def train_model(args: argparse.Namespace, device: torch.device) -> None:
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR, format="%(message)s")
    training_directory, validation_directory = digits_of(args)
    training_data, validation_data = DigitFolder(training_directory), DigitFolder(validation_directory)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net().to(device))
    sampler = ElasticDistributedSampler(training_data, seed=args.seed, epochs=args.num_epochs)
    training = Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=args.learning_rate),
        sampler=sampler,
        checkpoints=CheckpointDirectory(args.checkpoint_dir),
        device=device,
        learning_rate=args.learning_rate,
        num_epochs=args.num_epochs,
    )
    training.resume()
    loader = DataLoader(training_data, batch_sampler=ElasticBatchSampler(sampler, args.batch_size), collate_fn=collate)
    train(training, loader, validation_data, args)


@record
def main() -> None:
    args = parse_arguments()
    with process_group(args.no_cuda) as device:
        train_model(args, device)


if __name__ == "__main__":
    main()
