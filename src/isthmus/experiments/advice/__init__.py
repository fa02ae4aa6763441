"""Which methods fit a graph and its owners: facts are measured, rules speak, and the best is picked on validation.

facts   sizes, skew, and what plain models reach with and without neighbours     [facts.py]
plans   a method with settings for data nobody has tuned                         [plans.py]
rules   from facts to plans in order of preference, each with its reason         [rules.py]
auto    run the first few on the same scenario and keep the best on validation   [auto.py]
"""
