"""Why a masked sentence or a question is answered as it is."""
