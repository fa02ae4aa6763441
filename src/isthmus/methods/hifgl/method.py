"""HiFGL as a method: the algorithm with the protocol that ``secmp`` names."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.federation.roles import Role
from isthmus.methods.hifgl import algorithm, facts
from isthmus.methods.hifgl.algorithm import SecMP
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.hardened import Hardened
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
        predict=lambda s, f, config: algorithm.predict(s, f, protocol(config)),
        predict_script=lambda config, view: algorithm.predict_script(view, protocol(config)),
        gives_details=algorithm.details,
        detail_script=algorithm.detail_script,
        roles=roles(HiFGLConfig()),
        roles_with=roles,
        script=lambda config, view: algorithm.script(view, protocol(config)),
        preset="hifgl",
        cross_edges=True,
        privacy=facts.privacy,
        facts=lambda state, config, scenario: facts.facts(state, protocol(config), scenario),
    )
)
