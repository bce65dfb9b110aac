"""transformers' Trainer on scikit-learn's digits: fine-tunes a ConvNeXt, or trains a tiny one."""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import ConvNextConfig, ConvNextForImageClassification, Trainer, TrainingArguments

import paceline
from paceline_huggingface import PacelineCallback

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder of weights to begin with (save_pretrained's)")
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--epochs", type=float, default=2)
parser.add_argument("--resume", help="a checkpoint to go on from")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

pixels, labels = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
samples = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]

torch.manual_seed(options.seed)
tiny = ConvNextConfig(
    num_channels=1, patch_size=2, num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10, drop_path_rate=0.0
)
network = ConvNextForImageClassification
model = network.from_pretrained(options.model) if options.model else network(tiny)

arguments = TrainingArguments(
    learning_rate=options.lr,
    num_train_epochs=options.epochs,
    per_device_train_batch_size=32,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=10,
    report_to=[],
    disable_tqdm=True,
    seed=options.seed,
    use_cpu=not torch.cuda.is_available(),  # else each rank on a processor trains all of it by itself
    dataloader_pin_memory=torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=samples[:1500],
    eval_dataset=samples[1500:],
    compute_metrics=lambda seen: {"accuracy": float((seen.predictions.argmax(1) == seen.label_ids).mean())},
    callbacks=[PacelineCallback()],
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.evaluate()  # also where the last step's checkpoint leaves nothing to train
if trainer.is_world_process_zero():
    model.save_pretrained(paceline.run_dir() / "model")
trainer.accelerator.end_training()  # ranks part from each other in order, as torch asks for
