// The page's behaviour: poses arrive as server-sent events and drive the badge and the chart; the state is asked for
// once a second. When the service restarts, everything is connected again by itself.
"use strict";

const REASONS = {
  "no-npu": "This board's profile has no NPU",
  "starting": "The NPU is still starting",
  "hung": "The NPU hung; its worker was ended and is being replaced",
  "slow": "The NPU missed its deadline; the CPU answered first",
  "crashed": "The NPU's worker crashed and is being replaced",
  "error": "The NPU reported an error",
  "wrong-result": "The NPU failed the golden frame: its answers were wrong",
  "refused": "The NPU's driver refused the model",
  "busy": "Another process holds the NPU",
  "device-gone": "The NPU's device node is gone",
  "bad-model": "The NPU cannot load the model",
  "mismatch": "The model was made for another version of what this board has",
  "quarantined": "The NPU's worker cannot be ended",
  "idle": "The NPU was closed while nobody asked, and is opening again",
};
const COLOURS = { npu: "#3ddc84", cpu: "#ffb340", none: "#6b7785" };
const CHART_SECONDS = 10;

const at = (id) => document.getElementById(id);
const put = (id, text) => { const node = at(id); if (node.textContent !== text) node.textContent = text; };
const points = [];
let streaming = false;

function showBackend(backend, reason, words) {
  document.body.dataset.backend = backend;
  put("backend", backend === "none" ? "–" : backend.toUpperCase());
  put("who", { npu: "The NPU answers", cpu: "The CPU answers", none: "Nothing answers" }[backend]);
  put("why", reason === "ok" ? "Frames meet their deadline" : words || REASONS[reason] || reason);
}

function showStatus(status) {
  document.body.dataset.state = status.state;
  put("state", status.state);
  put("model", status.model.name);
  put("version", status.model.version);
  put("fps", status.fps.toFixed(1));
  put("p50", status.latency_ms.p50.toFixed(1));
  put("p95", status.latency_ms.p95.toFixed(1));
  for (const key of ["frames", "fallbacks", "restarts"]) put(key, status[key].toLocaleString("en"));
  put("accelerator", `Accelerator ${status.accelerator.name}`);
  put("camera", `Camera ${status.camera.source}`);
  showBackend(status.backend, status.reason);
  const cover = at("cover");
  const noFrame = status.state === "starting" || status.state === "no-camera";
  cover.hidden = !noFrame;
  put("cover", status.state === "no-camera" ? `No camera: ${status.camera.problem}` : "Waiting for the first frame");
  showEvents(status.events);
}

function showEvents(events) {
  if (!events.length) return;
  const list = at("events");
  const key = events.length + events[events.length - 1].at + events[events.length - 1].text;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...events.slice().reverse().map((event) => {
    const item = document.createElement("li");
    const time = document.createElement("time");
    time.dateTime = event.at;
    time.textContent = new Date(event.at).toLocaleTimeString("en-GB");
    const text = document.createElement("span");
    text.className = event.kind;
    text.textContent = event.text;
    item.append(time, text);
    return item;
  }));
}

function drawChart() {
  const canvas = at("chart");
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = 96;
  if (canvas.width !== Math.round(width * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const now = performance.now();
  while (points.length && now - points[0].at > CHART_SECONDS * 1000) points.shift();
  const most = Math.max(10, ...points.map((point) => point.latency));
  const top = most > 50 ? Math.ceil(most / 50) * 50 : Math.ceil(most / 10) * 10;
  pen.strokeStyle = "#262f3a";
  pen.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round((height - 2) * part) + 0.5;
    pen.beginPath(); pen.moveTo(0, y); pen.lineTo(width, y); pen.stroke();
  }
  for (const point of points) {
    const x = width - (now - point.at) / (CHART_SECONDS * 1000) * width;
    const tall = Math.max(2, point.latency / top * (height - 2));
    pen.fillStyle = COLOURS[point.backend];
    pen.fillRect(x - 1, height - tall, 2, tall);
  }
  put("scale", `0 to ${top} ms`);
}

function connectStream() {
  const image = at("stream");
  // A new address each time: a browser does not open the same broken stream again.
  image.src = `stream?${Date.now()}`;
  streaming = true;
}

async function poll() {
  try {
    const answer = await fetch("api/status", { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    showStatus(await answer.json());
    if (!streaming) connectStream();
  } catch {
    streaming = false;
    document.body.dataset.state = "gone";
    document.body.dataset.backend = "none";
    put("state", "not reachable");
    put("backend", "–");
    put("who", "The service does not answer");
    put("why", "Trying again every second");
    at("cover").hidden = false;
    put("cover", "The service does not answer");
  }
}

const poses = new EventSource("api/poses");
poses.onmessage = (message) => {
  const pose = JSON.parse(message.data);
  points.push({ at: performance.now(), latency: pose.latency_ms, backend: pose.backend });
  showBackend(pose.backend, pose.reason);
  at("stream").parentElement.style.aspectRatio = `${pose.frame[0]} / ${pose.frame[1]}`;
};
at("stream").addEventListener("error", () => { streaming = false; });

poll();
setInterval(poll, 1000);
setInterval(drawChart, 100);
