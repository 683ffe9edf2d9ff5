// An image in the form of each client. The model sees the same in all of them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import OpenAI from "openai";

const { url, image, question, answer, maxTokens } = JSON.parse(process.env.SHOAL_IMAGES);
const model = "tiny-vl";
const dataUrl = `data:image/png;base64,${image}`;
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const settings = { baseURL: url, apiKey: "none" };
const openai = createOpenAI(settings);
const ways = {
  chat: openai.chat,
  responses: openai.responses,
  messages: createAnthropic(settings),
  compatible: createOpenAICompatible({ ...settings, name: "shoal" }),
};

test("OpenAI's chats", async () => {
  const content = [{ type: "image_url", image_url: { url: dataUrl } }, { type: "text", text: question }];
  const asked = { model, temperature: 0, max_tokens: maxTokens, messages: [{ role: "user", content }] };
  const reply = await client.chat.completions.create(asked);
  assert.equal(reply.choices[0].message.content, answer);
});

test("OpenAI's responses", async () => {
  const content = [{ type: "input_image", image_url: dataUrl, detail: "auto" }, { type: "input_text", text: question }];
  const asked = { model, temperature: 0, max_output_tokens: maxTokens, input: [{ role: "user", content }] };
  assert.equal((await client.responses.create(asked)).output_text, answer);
});

for (const [name, way] of Object.entries(ways)) {
  test(`the AI SDK's ${name}`, async () => {
    const file = Buffer.from(image, "base64");
    const content = [{ type: "image", image: file }, { type: "text", text: question }];
    const asked = { model: way(model), temperature: 0, maxRetries: 0, maxOutputTokens: maxTokens };
    const reply = await generateText({ ...asked, messages: [{ role: "user", content }] });
    assert.equal(reply.text, answer);
  });
}
