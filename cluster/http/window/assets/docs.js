// The page /docs: sends what its forms say, with the key that is typed in, and shows what comes as it comes.

const key = document.getElementById("key");
const running = new WeakMap(); // by form: what ends its request

// As app.js makes them: a module that both share would be one more request and one more route for five lines.
function headers(body) {
  const known = sessionStorage.getItem("mneme-key");
  return {
    ...(body === undefined ? {} : { "content-type": "application/json" }),
    ...(known ? { authorization: `Bearer ${known}` } : {}),
  };
}

// What a form asks for.
function asked(form) {
  const query = new URLSearchParams();
  let path = form.dataset.path;
  for (const field of form.querySelectorAll("input")) {
    if (field.dataset.in === "path") path = path.replace(`{${field.name}}`, () => encodeURIComponent(field.value));
    else if (field.value) query.set(field.name, field.value);
  }
  return { method: form.dataset.method, path: `${path}${query.size ? "?" : ""}${query}`, body: form.elements.body?.value };
}

function showCurl(form) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const { method, path, body } = asked(form);
  const parts = ["curl -N", ...(method === "GET" ? [] : [`-X ${method}`]), quoted(location.origin + path)];
  if (key) parts.push('-H "Authorization: Bearer $KEY"');
  if (body !== undefined) parts.push(`-H 'Content-Type: application/json' -d ${quoted(body.replace(/\n\s*/g, " "))}`);
  form.querySelector(".curl").textContent = parts.join(" ");
}

async function send(form) {
  const { method, path, body } = asked(form);
  const [status, answer, stop] = ["output", ".answer", ".stop"].map((each) => form.querySelector(each));
  const control = new AbortController();
  running.get(form)?.abort();
  running.set(form, control);
  const isLast = () => running.get(form) === control;
  stop.hidden = false;
  answer.hidden = true;
  answer.textContent = "";
  status.textContent = "sent ...";
  const began = performance.now();
  const took = () => `${Math.round(performance.now() - began)} ms`;
  try {
    const response = await fetch(path, { method, body, headers: headers(body), signal: control.signal });
    status.textContent = `${response.status} ${response.statusText}, first byte after ${took()} ...`;
    answer.hidden = false;
    const decoder = new TextDecoder();
    for (let reader = response.body.getReader(), part; !(part = await reader.read()).done;) {
      answer.append(decoder.decode(part.value, { stream: true }));
    }
    if (response.headers.get("content-type")?.startsWith("application/json")) {
      answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
    }
    status.textContent = `${response.status} ${response.statusText}, ${took()}`;
    if (response.status === 401 && key) {
      status.textContent += ": type an API key at the top";
      key.focus();
    }
  } catch (error) {
    if (isLast()) status.textContent = control.signal.aborted ? `stopped after ${took()}` : error.message;
  }
  if (isLast()) stop.hidden = true;
}

if (key) {
  key.value = sessionStorage.getItem("mneme-key") ?? "";
  key.addEventListener("input", () => sessionStorage.setItem("mneme-key", key.value));
  key.form.addEventListener("submit", (event) => event.preventDefault());
}
for (const form of document.querySelectorAll("form[data-path]")) {
  showCurl(form);
  form.addEventListener("input", () => showCurl(form));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.querySelector(".stop").addEventListener("click", () => running.get(form)?.abort());
}
