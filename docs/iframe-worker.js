// Search runs beside the page, in a worker, which browsers refuse to pages that are opened as files: there a frame does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow, script = inside.document.createElement("script");
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done) => script.addEventListener("load", done));
      this.tell = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
      script.src = address;
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.tell(data));
    }
  };
}
