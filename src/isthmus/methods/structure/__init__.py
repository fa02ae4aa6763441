"""Parts of FedStruct that are long enough for files of their own: `fedstruct.py` beside this folder puts them
together.
"""
