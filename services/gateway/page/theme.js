// Runs before anything is drawn, so that a chosen theme does not flash.
document.documentElement.dataset.theme = localStorage.getItem("shoal-theme") ?? "auto";
