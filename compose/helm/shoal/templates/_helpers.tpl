{{/* Truncated: the label of a group's StatefulSet, name and hash, must be a valid label. */}}
{{- define "shoal.name" -}}
{{- $release := .Release.Name | trunc 35 | trimSuffix "-" }}
{{- if contains "shoal" $release }}{{ $release }}{{ else }}{{ $release }}-shoal{{ end }}
{{- end }}

{{/* Templates below that use root take a dict of root and service, a service's name. */}}

{{- define "shoal.selector" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end }}

{{- define "shoal.labels" -}}
{{ include "shoal.selector" . }}
app.kubernetes.io/version: {{ include "shoal.tag" .root | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* A label selector of all pods of a service, further ranks of workers included. */}}
{{- define "shoal.allPods" -}}
{{- if and (eq .service "worker") (gt (int .root.Values.worker.hosts) 1) -}}
matchLabels:
  app.kubernetes.io/name: shoal
  app.kubernetes.io/instance: {{ .root.Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [worker, rank]}
{{- else -}}
matchLabels: {{- include "shoal.selector" . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Not empty if there are encoders. */}}
{{- define "shoal.hasEncoders" -}}
{{- if gt (int .Values.encoder.replicas) 0 }}yes{{ end }}
{{- end }}

{{- define "shoal.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "shoal.image" -}}
{{- $kind := .service }}
{{- if has .service (list "worker" "encoder") }}{{ $kind = ternary "worker-gpu" "worker-cpu" (gt (int .root.Values.worker.gpus) 0) }}{{ end -}}
{{ .root.Values.image.prefix }}shoal-{{ $kind }}:{{ include "shoal.tag" .root }}
{{- end }}

{{/* Seconds between SIGTERM and SIGKILL: gateways wait for 5 before they begin to drain, and a drain
may end a little late. */}}
{{- define "shoal.graceSeconds" -}}
{{- $drain := 30 }}
{{- if hasKey .root.Values.settings "drain-timeout-s" }}{{ $drain = index .root.Values.settings "drain-timeout-s" }}{{ end -}}
{{ add (ceil $drain) 15 (ternary 5 0 (eq .service "gateway")) }}
{{- end }}

{{- define "shoal.modelPath" -}}
{{- $model := .Values.model }}
{{- if not $model.volume }}{{ fail "model.volume is empty: it must be the volume on which the model lies" }}{{ end }}
{{- if and $model.path $model.name }}{{ fail (printf "model.path is %q and model.name is %q: only one of them may be set" $model.path $model.name) }}{{ end }}
{{- if not (or $model.path $model.name) }}{{ fail "model.path and model.name are empty: one of them must be set" }}{{ end -}}
{{ if $model.path }}/models/{{ $model.path }}{{ else }}{{ $model.name }}{{ end }}
{{- end }}

{{/* The Deployment of a service. Its dict has update and the entries of shoal.pod. */}}
{{- define "shoal.deployment" -}}
{{- $values := index .root.Values .service }}
{{- $isScaled := ($values.autoscaling | default dict).enabled }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "shoal.name" .root }}-{{ .service }}
  labels: {{- include "shoal.labels" . | nindent 4 }}
spec:
  {{- if not $isScaled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "shoal.selector" . | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{ .update | toYaml | nindent 6 }}
  template: {{- include "shoal.pod" . | nindent 4 }}
{{- end }}
