// One step of tests/sessions.py through the openai package for Node: the step as JSON on stdin, what was read as JSON
// on stdout. It asks and reads; what should have been read, the test knows.

import { text } from "node:stream/consumers";
import OpenAI from "openai";
import { standardResponseFormat } from "openai/helpers/standard-schema";

const { url, way, ask, schema, result } = JSON.parse(await text(process.stdin));
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const chat = client.chat.completions;

const read = (message, finish, more = {}) => ({
  text: message.content ?? null,
  reasoning: message.reasoning_content ?? null,
  calls: (message.tool_calls ?? []).map((c) => [c.function.name, JSON.parse(c.function.arguments)]),
  finish,
  ...more,
});

const adds = (usage) => usage.completion_tokens > 0 && usage.total_tokens === usage.prompt_tokens + usage.completion_tokens;

// A streamed answer as { message, finish, usage }, joined by hand: the package's own joining is the way "helper".
async function joined(body) {
  const message = { role: "assistant", content: null };
  let finish = null;
  let usage = null;
  for await (const chunk of await chat.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
    usage = chunk.usage ?? usage;
    for (const { delta, finish_reason } of chunk.choices) {
      finish = finish_reason ?? finish;
      if (delta.content) message.content = (message.content ?? "") + delta.content;
      if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
      for (const { index, id, type, function: f } of delta.tool_calls ?? []) {
        message.tool_calls ??= [];
        message.tool_calls[index] ??= { id, type, function: { name: f.name, arguments: "" } };
        message.tool_calls[index].function.arguments += f.arguments ?? "";
      }
    }
  }
  return { message, finish, usage };
}

async function answer(body) {
  if (body.stream) return joined(body);
  const whole = await chat.create(body);
  return { message: whole.choices[0].message, finish: whole.choices[0].finish_reason };
}

const WAYS = {
  async models() {
    const [first] = (await client.models.list()).data;
    return { model: first.object === "model" && first.context_length > 0 };
  },
  async whole() {
    const whole = await chat.create(ask);
    return whole.choices.map((c) => read(c.message, c.finish_reason, { usage: adds(whole.usage) }));
  },
  async stream() {
    const { message, finish, usage } = await joined(ask);
    return [read(message, finish, { usage: adds(usage) })];
  },
  async helper() {
    const [choice] = (await chat.stream(ask).finalChatCompletion()).choices;
    return [read(choice.message, choice.finish_reason)];
  },
  async completion() {
    const [choice] = (await client.completions.create(ask)).choices;
    return [read({ content: choice.text }, choice.finish_reason)];
  },
  async logprobs() {
    const [choice] = (await chat.create(ask)).choices;
    const entries = choice.logprobs.content;
    const bytes = Buffer.from(entries.flatMap((e) => e.bytes)).toString("utf8");
    const certain = entries.every((e) => e.logprob === 0 && e.top_logprobs.length === 1);
    return [read(choice.message, choice.finish_reason, { bytes, certain })];
  },
  async error() {
    try {
      await chat.create(ask);
    } catch (e) {
      return { status: e.status, code: e.code, param: e.param };
    }
    return null;
  },
  async tools() {
    const first = await answer(ask);
    const results = first.message.tool_calls.map((c) => ({ role: "tool", tool_call_id: c.id, content: result }));
    const second = await answer({ ...ask, messages: [...ask.messages, first.message, ...results] });
    return [first, second].map(({ message, finish }) => read(message, finish));
  },
  async "run-tools"() {
    const { function: weather, ...tool } = result.tool;
    const tools = [{ ...tool, function: { ...weather, function: () => result.text, parse: JSON.parse } }];
    const choice = (await chat.runTools({ ...ask, tools }).finalChatCompletion()).choices[0];
    return [read(choice.message, choice.finish_reason)];
  },
  async parse() {
    const person = { "~standard": { version: 1, vendor: "test", validate: (value) => ({ value }) } };
    const whole = await chat.parse({ ...ask, response_format: standardResponseFormat(person, "Person", { schema }) });
    return whole.choices[0].message.parsed;
  },
};

console.log(JSON.stringify(await WAYS[way]()));
