"""Reports that print as text and show as HTML: pages of sentences and tables, and numbers with their units.

Example:
    >>> from popxl.extend.pages import bytes_text
    >>> bytes_text(131072)
    '131 kB'
"""

from popxl.base.pages import OnPage, Page, Picture, Table, bytes_text, count_text, flops_text, listed, seconds_text

__all__ = ["OnPage", "Page", "Picture", "Table", "bytes_text", "count_text", "flops_text", "listed", "seconds_text"]
