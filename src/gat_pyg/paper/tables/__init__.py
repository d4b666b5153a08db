"""The paper's tables with our numbers beside, and the strongest networks beside published numbers."""
