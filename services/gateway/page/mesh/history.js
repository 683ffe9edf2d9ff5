const NUM_KEPT = 60;

/** The last values of some numbers, by name. */
export class History {
  #values = new Map();

  note(name, value) {
    const values = this.#values.get(name) ?? [];
    values.push(value ?? 0);
    this.#values.set(name, values.slice(-NUM_KEPT));
    return this.#values.get(name);
  }
}
