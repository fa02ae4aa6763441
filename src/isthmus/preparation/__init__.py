"""What owners of tables do together before the first round: agree on scaling, and on the edges between them.

owner.py      the owner's side: one class whose handlers give sums, and mail for linking
rounds.py     the server's side: the order of the steps
linking.py    ids under a common key, and the edges two owners both list
sheet.py      what the messages disclose, stated in advance
prepared.py   from tables and what was agreed to the data a method is given
"""

SCALING, LINKING = "scaling", "linking"
"""Phases, as the ledger names them."""
