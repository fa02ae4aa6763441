"""What a named party can compute from what it saw.

Each attack is a function from plain values (arrays a party was sent, and what is public) to what it recovers. It says
by itself how sure it is (``exact``, ``certain``, ``plausible``); where the truth is at hand, ``score`` gives a
:class:`Recovery`. Tests run every attack twice: it must succeed without the protection it belongs to and fail with it.

=========================================================  =====================================
                                                           ===========================
attack                                                     what the party saw                     protection
=========================================================  =====================================
                                                           ===========================
``gradients.inputs_from_linear_gradient``                  one record's gradient of a layer       secure sum, clip and
                                                           noise
``features.learn_decoder``, ``features.words_from_scores``  embeddings, and a decoder or an ally    independent
                                                            encoders, few bits
``labels.labels_from_embedding_gradient``                  gradients per node, output layer       clip and noise
``labels.labels_from_signs``                               residuals per node (up to a factor)    secure sum, clip and
                                                           noise
``membership.membership_by_loss``                          a model                                noise in training
``sums.difference_of_sums``                                totals over several rosters            roster guard
``sums.difference_under_one_mask``                         two uploads under one mask             masks per tag
``shares.*``                                               shares of HiFGL as published           fresh masks, one share
                                                           each
``structure.neighbours_from_hop_products``                 FedStruct's hop products per client    secure sum of the
                                                           products
``structure.reached_from_gradient``                        one client's gradient of all S rows    secure sum
``structure.entries_from_support``                         announced positions                    dummies
``relay.Relay``, ``relay.Impersonator``                    session keys it carries                signed keys
=========================================================  =====================================
                                                           ===========================
"""

from isthmus.privacy.attacks.result import Recovery

__all__ = ["Recovery"]
