"""The engine process as its frontend sees it: started, supervised, admitted to, and blamed for its crashes."""
