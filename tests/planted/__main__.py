"""`python -m tests.planted`: find all bugs, and write the table."""

from tests.planted.table import TABLE, findings, table

TABLE.write_text(table(findings()))
