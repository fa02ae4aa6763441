"""Protections, built once for all methods, and the attacks they are tested against.

==================  ====================================================================================================
``field``           arithmetic modulo a prime on arrays; ``fixedpoint`` puts real numbers into it
``lagrange``        shares of a vector: any T of T + 1 tell nothing, sums of shares are shares of the sum
``masks``           sums of which the server learns only the total; ``leaves`` turns messages into words and back,
                    ``sparse`` sums over an announced support, ``guard`` refuses pairs of sums that give one party away
``keys``            session keys signed by long-term ones; ``envelope`` is sealed mail under them
``secmp``           sums over neighbours of which the neighbours' parts stay hidden (HiFGL), with ``chacha`` (a stream
                    per
                    edge) and ``boxes`` (mail from nobody in particular)
``dp``              clip and noise; ``accountant`` says what it is worth (extra ``dp``)
``attacks``         what a named party can compute from what it saw
==================  ====================================================================================================

Everything works on arrays and plain values: no model, federation or engine is known here. Parties are taken to be
*honest but curious* unless a docstring says more. Secrets come from the operating system, never from a seeded
generator.
"""
