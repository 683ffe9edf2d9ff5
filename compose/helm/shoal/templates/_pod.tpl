{{/* What a pod of a service is made of, the metadata and spec of a template. Its dict has besides:
ports, env and envFields (of the pod itself) by name, alive and ready, which are paths of probes, and where
there are some, component, which is the service but for further ranks, resources, mounts and volumes. */}}
{{- define "shoal.pod" -}}
{{- $values := index .root.Values .service }}
{{- $hasModel := has .service (list "tokenizer" "worker" "encoder") }}
{{- $owner := ternary "worker" .service (eq .service "encoder") -}}
metadata:
  labels: {{- include "shoal.selector" (dict "root" .root "service" (.component | default .service)) | nindent 4 }}
  annotations:
    checksum/settings: {{ .root.Values.settings | toYaml | sha256sum }}
spec:
  automountServiceAccountToken: false
  # Variables of Services, such as SHOAL_PORT, would be taken for settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "shoal.graceSeconds" . }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # One node lost takes as few as possible.
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {{- include "shoal.allPods" . | nindent 8 }}
  containers:
    - name: {{ .service }}
      image: {{ include "shoal.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      ports:
        - {name: admin, containerPort: 9100}
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      env:
        - {name: SHOAL_CONFIG, value: /settings/shoal.yml}
        - {name: SHOAL_KEYS, value: /keys}
        {{- range $name, $value := .env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
        {{- range $name, $path := .envFields }}
        - {name: {{ $name }}, valueFrom: {fieldRef: {fieldPath: {{ $path }}}}}
        {{- end }}
        {{- if $hasModel }}
        - {name: SHOAL_MODEL, value: {{ include "shoal.modelPath" .root | quote }}}
        {{- if .root.Values.model.name }}
        - {name: HF_HOME, value: /models}
        {{- end }}
        {{- end }}
        {{- with .root.Values.secrets.adminToken }}
        - name: SHOAL_ADMIN_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: admin-token}}
        {{- end }}
        {{- if eq .service "gateway" }}
        {{- with .root.Values.secrets.reasoningKey }}
        - name: SHOAL_REASONING_KEY
          valueFrom: {secretKeyRef: {name: {{ . }}, key: reasoning-key}}
        {{- end }}
        {{- end }}
      startupProbe:
        httpGet: {path: {{ .alive }}, port: admin}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add .root.Values.startupSeconds 4) 5 }}
      livenessProbe:
        httpGet: {path: {{ .alive }}, port: admin}
        periodSeconds: 5
        timeoutSeconds: 5
      readinessProbe:
        httpGet: {path: {{ .ready }}, port: admin}
        periodSeconds: 2
        timeoutSeconds: 5
        # A scheduler that starts again makes all gateways unready for some seconds, in which
        # they let requests wait.
        failureThreshold: 8
      {{- if eq .service "gateway" }}
      lifecycle:
        # Until no node sends new connections here.
        preStop: {exec: {command: [sleep, "5"]}}
      {{- end }}
      resources: {{- .resources | default $values.resources | toYaml | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: settings, mountPath: /settings, readOnly: true}
        - {name: public-keys, mountPath: /keys/public, readOnly: true}
        - {name: secret-key, mountPath: /keys/{{ $owner }}, readOnly: true}
        {{- if $hasModel }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- range .mounts }}
        - {{ toJson . }}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: settings, configMap: {name: {{ include "shoal.name" .root }}-settings}}
    - {name: public-keys, secret: {secretName: {{ .root.Values.secrets.keysPrefix }}-public}}
    - {name: secret-key, secret: {secretName: {{ .root.Values.secrets.keysPrefix }}-{{ $owner }}, defaultMode: 0400}}
    {{- if $hasModel }}
    - {{ merge (dict "name" "models") .root.Values.model.volume | toJson }}
    {{- end }}
    {{- range .volumes }}
    - {{ toJson . }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
