// Videos play while they are in view, pause on a click, and step by one frame with the arrow keys.
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting && !still && !target.dataset.paused) target.play();
    else target.pause();
  }
});
for (const video of document.querySelectorAll("video")) {
  const frames = Number(video.dataset.frames), fps = Number(video.dataset.fps);
  const count = video.parentElement.querySelector(".count");
  const index = () => Math.min(frames - 1, Math.floor(video.currentTime * fps + 1e-3));
  const show = () => { count.textContent = `frame ${index()} of ${frames - 1}`; };
  const tick = () => { show(); video.requestVideoFrameCallback(tick); };
  const pause = (on) => {
    if (on) { video.dataset.paused = 1; video.pause(); } else { delete video.dataset.paused; video.play(); }
  };
  if (video.requestVideoFrameCallback) video.requestVideoFrameCallback(tick);
  if (still) { video.removeAttribute("autoplay"); pause(true); }
  video.addEventListener("click", () => pause(!video.paused));
  video.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key !== " " && !step) return;
    event.preventDefault();
    if (!step) return pause(!video.paused);
    pause(true);
    video.currentTime = ((index() + step + frames) % frames + 0.5) / fps;
    show();
  });
  seen.observe(video);
}
