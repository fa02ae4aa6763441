"""An owner's tables: nodes, edges and labels in CSV or Parquet files, described by one ``schema.toml``.

schema.py       what ``schema.toml`` may say, read and checked
reader.py       CSV and Parquet files to typed columns; a wrong cell is named by file, line and column
ids.py          ids in the form in which they are compared
owner.py        one owner's folder: ids, features, labels, edges
edge_table.py   edges of one owner: own, towards others, outside; what a node learns from its edges
frames.py       polars and pyarrow, imported where they are used
scaling.py      what owners sum up to agree on scaling and imputation, and features made from it
check.py        what is wrong with a folder, and a summary that gives nothing away
describe.py     a draft of ``schema.toml`` from the files

What several owners do together with their tables, and the edges between them, is in `isthmus.preparation`.
"""
