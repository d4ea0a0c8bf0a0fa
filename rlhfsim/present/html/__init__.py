"""Pages of a report: content, HTML, Plotly."""
