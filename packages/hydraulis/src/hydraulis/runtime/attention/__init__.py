"""Attention by document under transformers' own models, and the check that nothing else mixes tokens."""

from hydraulis.runtime.attention.by_document import attend
from hydraulis.runtime.attention.hooks import hook_documents, use_document_attention
from hydraulis.runtime.attention.isolation import DocumentLimits, check_isolation
from hydraulis.runtime.attention.packed import PackedDocuments

__all__ = [
    "DocumentLimits",
    "PackedDocuments",
    "attend",
    "check_isolation",
    "hook_documents",
    "use_document_attention",
]
