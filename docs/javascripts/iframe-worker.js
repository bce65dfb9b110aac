// Browsers start no worker of a page that is opened from a disk, so there the search runs in a hidden frame. The name of this
// file keeps mkdocs-material from loading its own from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      const load = source =>
        new Promise((loaded, failed) => {
          const script = this.inside.document.createElement("script")
          Object.assign(script, { src: source, onload: loaded, onerror: failed })
          this.inside.document.head.append(script)
        })
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.ready = load(new URL(url, location.href).href)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }
  }
}
