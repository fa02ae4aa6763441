"""Backbones and the one local training loop.

build_backbone -> model           a node model and its first weights; build_graph_model for graphs
build_inputs(data, model, mask)   constant inputs of one client; stack_inputs joins many into a cohort
train_locally, gradients          a client's (or a cohort's) share of a round
predict                           logits

A new backbone, of nodes and graphs alike, is a new file in `isthmus.nn.architectures`.
"""

from isthmus.nn.backbone import Backbone
from isthmus.nn.buffers import Workspace
from isthmus.nn.cohort import stack_states, stack_weights, unstack_states, unstack_weights
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs, build_inputs, stack_inputs
from isthmus.nn.loss import get_loss, losses
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.registry import backbones, build_backbone
from isthmus.nn.train import ExtraGradient, Proximal, TrainResult, gradients, predict, train_locally

__all__ = [
    "Backbone",
    "DropoutSource",
    "ExtraGradient",
    "Inputs",
    "OptimizerState",
    "Proximal",
    "TrainResult",
    "Workspace",
    "backbones",
    "build_backbone",
    "build_inputs",
    "fresh_state",
    "get_loss",
    "gradients",
    "losses",
    "predict",
    "stack_inputs",
    "stack_states",
    "stack_weights",
    "train_locally",
    "unstack_states",
    "unstack_weights",
]
