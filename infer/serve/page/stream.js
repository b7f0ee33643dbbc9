// Calls of the API.

const headers = (key) => ({
  "Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {}),
});

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Browsers say "network error" and the like where a server ended, or cannot be reached.
const lost = (error) => {
  throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it running?");
};

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new ApiError(response.status, body?.error?.message ?? `the server says ${response.status}`);
}

async function modelName(key) {
  const response = await fetch("v1/models", {headers: headers(key)}).catch(lost);
  if (!response.ok) throw await failure(response);
  return (await response.json()).data[0].id;
}

// Decodes; calls `onNews` with each part of the trace. Returns why the answer ended.
async function decode({route, key, signal, body}, onNews) {
  const path = route === "chat" ? "v1/chat/completions" : "v1/completions";
  const response = await fetch(path, {
    method: "POST", signal, headers: headers(key),
    body: JSON.stringify({...body, stream: true, return_trace: true}),
  }).catch(lost);
  if (!response.ok) throw await failure(response);
  let reason = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new ApiError(500, event.error.message);
    const choice = event.choices[0];
    if (choice?.trace) onNews(choice.trace);
    reason = choice?.finish_reason ?? reason;
  }
  if (reason === null) throw new Error("the connection ended before the answer did");
  return reason;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read().catch(lost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
