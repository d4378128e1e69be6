"""Every private name of torch, Lightning and torchmetrics that the package uses; README.md lists them all."""
