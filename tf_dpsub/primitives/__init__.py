"""Parts of all mechanisms: clipping, and noise on a public grid."""
