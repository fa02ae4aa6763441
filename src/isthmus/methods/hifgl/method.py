"""HiFGL as a method: the algorithm with the protocol that ``secmp`` names, and the disclosure sheet that follows."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Message
from isthmus.federation.roles import Role
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.hifgl import algorithm, facts
from isthmus.methods.hifgl.algorithm import SecMP
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.hardened import Hardened
from isthmus.methods.hifgl.messages import Common, DeviceGradients, Down, Labelled, Sizes, Update
from isthmus.methods.hifgl.parties import register_of
from isthmus.methods.hifgl.plain import Plain
from isthmus.methods.hifgl.published import Published
from isthmus.methods.registry import Method, Phase, register

PROTOCOLS: Mapping[str, type[SecMP]] = {"hardened": Hardened, "published": Published, "plain": Plain}


def protocol(config: HiFGLConfig) -> SecMP:
    return PROTOCOLS[config.secmp](config)


def roles(config: HiFGLConfig) -> dict[str, Role]:
    """A party accepts only the handlers of the protocol its run uses."""
    secmp = protocol(config)
    return {"client": Role(secmp.silo, holds=register_of), "device": Role(secmp.devices)}


def sheet(config: HiFGLConfig) -> tuple[Disclosure, ...]:
    """Who sees what with these settings."""
    secmp = protocol(config)
    exchange = secmp.lines()
    never_raw = config.first_layer == "project" and 1 not in config.personal
    setup = (*secmp.setup_lines(), *(() if never_raw else exchange))
    if config.mode == "cross-device":
        model = ("server", "device", Down)
        return (
            Disclosure("setup", "device", "server", Labelled, "summed"),
            *_clear("setup", *setup),
            *_clear("train", model, *exchange),
            Disclosure("train", "device", "server", DeviceGradients, "summed"),
            *_clear("evaluation", ("server", "client", Common), model, *exchange, ("device", "server", Evaluation)),
        )
    models = ("server", "client", Common), ("client", "device", Down)
    scores = ("device", "client", Evaluation), ("client", "server", Evaluation)
    return (
        *_clear("setup", ("device", "client", Labelled), *setup),
        Disclosure("setup", "client", "server", Sizes, "summed"),
        *_clear("train", *models, *exchange, ("device", "client", DeviceGradients)),
        Disclosure("train", "client", "server", Update, "summed"),
        *_clear("evaluation", *models, *exchange, *scores),
    )


def _clear(phase: str, *lines: tuple[str, str, type[Message]]) -> tuple[Disclosure, ...]:
    return tuple(Disclosure(phase, *line) for line in lines)


METHOD = register(
    Method(
        name="hifgl",
        summary="devices, silos, server: exact GNN over all edges by secret message passing",
        reference=(
            "Guo et al., HiFGL: A Hierarchical Framework for Cross-silo Cross-device Federated Graph Learning, KDD 2024"
        ),
        config=HiFGLConfig,
        tasks=("node",),
        init=lambda view, config, common: algorithm.init(view, common, protocol(config)),
        phases=(
            Phase("setup", lambda s, f, config: algorithm.setup_round(s, f, protocol(config)), rounds=1, setup=True),
            Phase("train", lambda s, f, config: algorithm.train_round(s, f, protocol(config))),
        ),
        evaluate=lambda s, f, config: algorithm.evaluate(s, f, protocol(config)),
        roles=roles(HiFGLConfig()),
        roles_with=roles,
        discloses=sheet(HiFGLConfig()),
        sheet=sheet,
        preset="hifgl",
        cross_edges=True,
        privacy=facts.privacy,
        facts=lambda state, config, scenario: facts.facts(state, protocol(config), scenario),
    )
)
