// Browsers start no workers for pages from the disk. The search then runs in a hidden
// frame, which has the same interface. Loaded by the theme before its own scripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.postMessage = (data) => setTimeout(answer, 0, data);
      this.inner = inner;
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        script.src = url;
        inner.document.head.append(script);
      });
    }
    postMessage(data) {
      const send = () => this.inner.dispatchEvent(new MessageEvent("message", { data }));
      this.ready.then(send, console.warn);
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
