"""stable-baselines3: SAC on Pendulum, with target networks and a learned entropy coefficient."""

from stable_baselines3 import SAC
from weights import save_digest

model = SAC("MlpPolicy", "Pendulum-v1", learning_starts=64, batch_size=32, seed=0, device="cpu")
model.learn(total_timesteps=128)
save_digest(model.policy, updates=model._n_updates)
